"""Reductions over all pairs in tiles: log-sum-exp, sums of elementwise functions, row thresholds."""
