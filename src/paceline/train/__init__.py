"""Training of drafters: the target writes its own data, a small module learns from it, and common formats come out."""
