"""What a run keeps in its folder: its configuration, how it stands, its checkpoints, and what did not go as planned."""
