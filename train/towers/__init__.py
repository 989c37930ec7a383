"""Towers: open_clip, transformers, timm and our own CNN, with LoRA adapters and the cache of frozen features."""
