"""Results of evaluators: their columns, files, panels, galleries."""
