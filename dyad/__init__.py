"""Dyad: distributed CLIP and DPR training. In a checkout `train`, `data`, `eval` and `configs` are links to the folders
at the top of the repository; the wheel holds them here. Importing this package loads nothing heavy."""
