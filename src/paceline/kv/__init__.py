"""Who holds which block of the cache, and who shares a prefix. Integers only, no tensors."""
