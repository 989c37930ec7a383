"""Shards and rows read by offset: storage, the index of each shard, its cache, tables, manifests."""
