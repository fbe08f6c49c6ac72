"""Sizes, memory, pairs and predicted speed-up, from numbers alone. Never imports torch."""
