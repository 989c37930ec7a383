"""The data pipeline, from bytes to a Batch: shards, the two data sets, the order of samples, loading, the data
command."""
