"""Who holds which page of the cache, and who shares a prefix. Integers only, no tensors."""
