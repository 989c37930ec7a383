"""Tables as users have them (CSV, Parquet, Arrow, JSON, folders of pictures), and their conversion to shards that are
read by offset."""
