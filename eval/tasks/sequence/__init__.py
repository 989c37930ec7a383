"""Evaluation of task=sequence: next-item prediction and its baselines."""
