"""Towers of pictures, and what they do with pixels and patches."""
