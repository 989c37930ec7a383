"""The command python -m eval.score, which scores prompts by a language model."""
