"""One file a family of models: how it writes tool calls, ending in its FORMAT."""
