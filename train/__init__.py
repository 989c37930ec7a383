"""The trainer. Importing this package loads nothing heavy."""
