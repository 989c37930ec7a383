"""Encoding of items into embeddings, in RAM or in a folder."""
