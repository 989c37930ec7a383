"""The kinds of data sets that eval.suite can name: modules for images, passages, answers, sequences, and samples with a
class. Importing these modules and checking entries of eval.suite needs no torch."""
