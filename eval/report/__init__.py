"""report.html: one page of a run that one can look at, hand over and print."""
