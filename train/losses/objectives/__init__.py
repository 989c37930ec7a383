"""The formulas of the objectives, one file per family, on top of the sums and the gathered batch."""
