"""The linter of trained heads: every reading of a head's files on text the target wrote, and the one they are for."""
