"""Finds wrong output of any OpenAI-compatible server: scenarios known to break engines, each with its statistics."""
