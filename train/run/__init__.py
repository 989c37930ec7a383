"""The wiring: the only code of training that knows the whole configuration. It builds and runs a run."""
