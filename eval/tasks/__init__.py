"""The evaluators: image–text retrieval, zero-shot classification, passage retrieval."""
