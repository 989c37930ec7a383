"""What needs a GPU: bash tests/gpu.sh, or python -m pytest -m gpu. Checks with a tiny form on a CPU run there, too.

plugin.py: what the machine lacks is not run, with the reason; figures go to RESULTS.md. needs.py: marks of tests.
bare.py: rates of the hardware, of which figures are shares. profiled.py: what torch.profiler sees of a call. models.py:
the models of which speed is measured. stand_in: omegaconf, for a machine that has torch and little else.
"""
