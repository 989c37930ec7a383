"""The data pipeline, from files to a Batch of tensors: shards and tables, data sets (image–text, question–passage,
sequences), the order of samples, loader processes, and the command `python -m data`."""
