"""Shards, order, loading: everything up to a Batch. Imports nothing of ours and, at the top, nothing heavy."""
