"""The HTML page of a run: `python -m eval.report` writes report.html."""
