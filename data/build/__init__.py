"""The verbs of `python -m data` that build files for training: continuations, negatives, sequences and weights."""
