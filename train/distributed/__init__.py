"""Work of several ranks together: process group, collectives, errors, stop signals, data parallelism."""
