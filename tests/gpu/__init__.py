"""What needs a GPU: bash tests/gpu.sh, or python -m pytest -m gpu. Checks with a tiny form on a CPU run there, too.

plugin.py: what the machine lacks is not run, with the reason; figures go to RESULTS.md.
"""
