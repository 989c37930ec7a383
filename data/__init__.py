"""From bytes to a Batch: shards, the two data sets, the order of samples, loading, and the data command."""
