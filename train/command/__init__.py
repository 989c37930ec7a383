"""The command line of the trainer: help, overrides, and what other trainers call our keys. Torch-free."""
