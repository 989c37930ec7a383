"""`python -m data`, the command line for data: its verbs index, check and pack."""
