"""What the loop observes: stragglers, loss spikes, bad samples, weights that differ between ranks."""
