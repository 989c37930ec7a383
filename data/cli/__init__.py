"""`python -m data`, the command line that inspects, checks and converts training data: its verbs index, check and pack,
and the tables of images that pack reads."""
