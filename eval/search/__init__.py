"""Search by embeddings: FAISS indexes, exact or approximate, and ranks of right items; and the fusion of rankings."""
