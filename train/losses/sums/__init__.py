"""Sums over all pairs of a global batch, in tiles: log-sum-exp, elementwise functions; row thresholds; all-gather."""
