"""One file a scenario. A new file is found by itself."""
