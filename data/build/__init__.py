"""What `python -m data` makes out of training data for training: hard negatives, and log q of items."""
