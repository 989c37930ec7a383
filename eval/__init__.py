"""Evaluation of dual encoders. Importing this package loads nothing heavy."""
