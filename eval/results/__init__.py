"""Results of evaluations: their JSON files, printed tables, example cases, and values for experiment trackers."""
