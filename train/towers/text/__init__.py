"""Towers of texts, their tokenizers, and how rows of tokens are grouped by length."""
