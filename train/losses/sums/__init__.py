"""Sums over all pairs of a global batch, in tiles, row thresholds, the all-gather with its gradient, and conditions.

The sums are log-sum-exp and sums of elementwise functions. Conditions are checked later (conditions.py).
"""
