"""Puts evaluation together: the commands python -m eval and python -m eval.mine, suites, loading of runs."""
