"""Search methods: FAISS indexes, and the fusion of rankings."""
