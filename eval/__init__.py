"""Evaluation of dual encoders: encode, search, measure, mine, report."""
