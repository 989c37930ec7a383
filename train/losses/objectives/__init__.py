"""The objectives: formulas over the reduced sums, one file per family."""
