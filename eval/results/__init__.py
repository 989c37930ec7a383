"""Results of evaluations: their JSON files, printed tables, example cases, and panels for trackers."""
