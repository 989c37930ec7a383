"""Evaluation of task=question_passage: passage retrieval, its question sets, and pairs of texts with a score."""
