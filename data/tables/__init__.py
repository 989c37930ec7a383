"""Tables as users have them (CSV, Parquet, Arrow, JSON, folders of images), and their conversion to shards that are
read by offset."""
