"""Towers of images, and what they do with pixels and patches."""
