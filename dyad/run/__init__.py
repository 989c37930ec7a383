"""A training run: checks of its command line, construction of its components, resuming, training and evaluation."""
