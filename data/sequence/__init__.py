"""The data set of task=sequence: logs of events or arrays of frames, their items, and batches made of them."""
