"""Embeddings of items in blocks, kept on disk where they are large."""
