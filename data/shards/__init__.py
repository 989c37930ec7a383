"""Read samples of shards and rows of files by byte offset: storage, the index of each shard, its cache, file lists."""
