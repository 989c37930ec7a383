"""The evaluators, one module for each task: image–text retrieval, zero-shot classification, passage retrieval."""
