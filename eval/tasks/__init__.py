"""Evaluators of retrieval, classification, probes, passages, sequences and answers; their task files and baselines."""
