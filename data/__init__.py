"""The data pipeline, from bytes to a Batch: shards, image–text and question–passage data, the order of samples,
loading, the data command."""
