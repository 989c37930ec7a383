"""Process group, collectives, agreement, failures, signals, data parallelism."""
