"""What `python -m data` does: index, check, pack. Imports nothing heavy."""
