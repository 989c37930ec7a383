"""The comparison of runs: `python -m eval.compare` prints the keys that differ, and a table of scores."""
