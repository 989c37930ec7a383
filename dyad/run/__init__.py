"""Puts a training run together and runs it. No other code of training knows the whole configuration."""
