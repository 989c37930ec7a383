"""The kinds of data sets that eval.suite can name, one module per content. Importing and checking them needs no
torch."""
