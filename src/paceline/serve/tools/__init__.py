"""Tool calls: what a request offers, how a model family writes a call, and a grammar that makes it write one."""
