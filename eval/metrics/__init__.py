"""Metrics: TREC measures, accuracy by answers, ranks of right items, AUC and correlations; 95 % intervals of means."""
