"""Sums over all pairs, in tiles: log-sum-exp, sums of elementwise functions, thresholds of rows, and the all-gather."""
