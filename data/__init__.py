"""Shards, order, loading: everything up to a Batch. Imports nothing of ours; stays light so that the command line is quick."""
