"""Weight formats: one file each. A format says which checkpoints it reads and makes linear layers of it."""
