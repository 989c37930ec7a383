"""The all-gathered batch: columns, candidates, duplicates, importance weights, per-sample state."""
