"""The HTML report of a run: `python -m eval.report` writes report.html."""
