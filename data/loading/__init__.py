"""Load training batches: the order of samples, the loader and its worker processes, replacement of bad samples."""
