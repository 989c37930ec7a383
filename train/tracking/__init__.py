"""What a run tells while it trains: to the console, to metrics.jsonl, to Weights & Biases and TensorBoard."""
