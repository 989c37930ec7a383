"""What several tests use: reference formulas, tiny runs and models, the server that starts commands."""
