"""Trained heads as torch modules, and their files: shared by drafting and train."""
