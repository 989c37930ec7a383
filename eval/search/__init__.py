"""FAISS indexes, BM25, fusion of rankings."""
