"""Sequences of items: logs of events and arrays of frames, and the batches that are made of them."""
