"""`python -m eval.report`: the page of a run."""
