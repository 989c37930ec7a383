"""Evaluation of sequences."""
