"""Evaluation: the commands python -m eval, eval.mine and eval.score, the suite of data sets, and loading of models."""
