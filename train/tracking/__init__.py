"""Send the metrics of a run to the console, metrics.jsonl, W&B and TensorBoard."""
