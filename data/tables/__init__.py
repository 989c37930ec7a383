"""Read tables (CSV, Parquet, Arrow, JSON, folders of images), and convert them to shards, which are read by offset."""
