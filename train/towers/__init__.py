"""Build the towers: open_clip, transformers, timm, our own CNN; with LoRA adapters and a cache of frozen features."""
