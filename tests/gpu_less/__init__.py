"""What is known of the code for GPUs without one.

pretend_cuda.py: tensors that say they are on cuda:0 and compute on the CPU; census.py: one training step on them.
sharded_steps.py: steps of towers sharded over such GPUs. test_*.py: these, the census of all objectives, rank 0 of
512, the kernels compiled ahead of time, the towers as one graph.
"""
