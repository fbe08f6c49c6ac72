"""One round (step), rounds until done (generate), ids <-> characters (text)."""
