"""The image–text data set: samples of shards, image transforms, hard negatives, streaming."""
