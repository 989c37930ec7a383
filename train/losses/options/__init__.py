"""The options of the objectives, one file per family, and the registry of names, without torch."""
