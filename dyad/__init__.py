"""Dyad: distributed CLIP and DPR training. Importing this package loads nothing heavy, such as torch.

In a checkout `train`, `data`, `eval` and `configs` are links to the folders at the top of the repository. The installed
wheel holds the folders themselves.
"""
