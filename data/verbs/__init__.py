"""What `python -m data` does: index, check, pack, unpack. Imports nothing heavy."""
