"""Architectures: one file each, wired out of layers/. `registry.py` maps a model type to its file."""
