"""`python -m data`, the command line that inspects, checks and converts training data: its main program, its options,
and the verbs index, check, pack and split. The verbs that build new data are in data/build."""
