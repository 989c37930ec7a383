"""The models of other libraries: open_clip, transformers, sentence-transformers; their files, weights and settings."""
