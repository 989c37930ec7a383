"""The plan of a run: estimates of memory, traffic, time and data for any number of GPUs, and a dry run of a step."""
