"""Search methods: FAISS indexes, BM25, and the fusion of rankings."""
