"""Shards and rows, read by byte offset: storage, the index of each shard and its cache, lists of files."""
