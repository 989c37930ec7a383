"""A plan of a run before it is paid for: memory, traffic, time and data for any number of GPUs, and a dry run."""
