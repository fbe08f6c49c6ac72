"""CUDA graphs, scratch buffers, streams: the only room that asks what kind of device it runs on."""
