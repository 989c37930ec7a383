"""Measures of rankings: TREC, answers, bootstrap intervals."""
