"""The verbs of `python -m data`: index, check, pack."""
