"""The run folder: name, checkpoints, state, ledger."""
