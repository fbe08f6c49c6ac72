"""A name -> files on disk: `default`, Hub ids, directories, GGUF files; download, conversion, cache, lock."""

from paceline.hub.locate import DEFAULT, ModelFiles, locate

__all__ = ["DEFAULT", "ModelFiles", "locate"]
