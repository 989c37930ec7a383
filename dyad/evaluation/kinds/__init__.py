"""The kinds of data sets that eval.suite can name: modules for images, passages, answers, sequences, and samples with a
class. Importing these modules needs no torch, nor does checking entries of eval.suite, except classes: of texts."""
