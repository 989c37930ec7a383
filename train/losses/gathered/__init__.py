"""The batch gathered from all ranks: its columns, candidates, duplicates, importance weights and per-sample state."""
