"""From sample ids to batches: the order of samples, the loader, its workers, replacements of bad samples."""
