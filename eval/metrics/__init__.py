"""Measures of rankings: TREC measures, accuracy by answers, and 95 % intervals."""
