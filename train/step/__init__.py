"""One optimiser step and the loop over steps: chunks, graphs, optimiser."""
