"""Programs that tests start with torchrun; each prints a line when all its checks hold."""
