"""The entry point of python -m eval.score. The command is in dyad/evaluation/score.py."""

from dyad.start import start

if __name__ == "__main__":
    start("dyad.evaluation.score")
