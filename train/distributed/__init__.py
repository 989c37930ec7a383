"""The ranks of a run: process groups, collectives, gradient averaging, checks that ranks are equal, failure reports."""
