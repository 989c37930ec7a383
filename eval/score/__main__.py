"""The command python -m eval.score, which scores prompts by a language model. Its main function is in
dyad/evaluation/score.py."""

from dyad.start import start

if __name__ == "__main__":
    start("dyad.evaluation.score")
