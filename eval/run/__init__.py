"""The wiring of evaluation: `python -m eval`, `python -m eval.mine`, suites, loading of runs."""
