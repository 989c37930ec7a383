"""Watch a run for slow ranks, loss spikes, bad samples and weights that differ; measure its time, memory and FLOPs."""
