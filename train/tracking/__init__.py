"""Where metrics go: the console, metrics.jsonl, W&B, TensorBoard."""
