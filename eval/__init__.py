"""Evaluation of dual encoders: encode items, search, compute metrics, mine hard negatives, write reports."""
