"""The options of each family of objectives, without torch."""
