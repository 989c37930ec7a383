"""The encoders: open_clip, timm, transformers and small CNN towers, their tokenizers, and the cache of frozen ones."""
