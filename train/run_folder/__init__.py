"""The run folder: its name and configuration, checkpoints, run_state.json, ledger.jsonl, restarts.jsonl."""
