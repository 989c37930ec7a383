"""The towers: open_clip, transformers, timm and our own, their adapters and the cache of frozen features."""
