"""Image towers, with the normalisation of pixels and the dropout of patches."""
