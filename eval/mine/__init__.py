"""Hard negatives mined with a model."""
