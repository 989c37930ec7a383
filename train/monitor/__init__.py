"""Watch a run for slow ranks (stragglers), loss spikes, bad samples, and weights that differ between ranks."""
