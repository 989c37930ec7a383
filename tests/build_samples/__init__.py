"""Builders of the data sets shipped in data/samples: `python -m tests.build_samples NAME`."""
