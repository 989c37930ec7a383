"""`python -m data`: index, check, pack."""
