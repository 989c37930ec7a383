"""The command python -m eval.mine, which mines hard negatives. Its main function is in dyad/evaluation/mine.py."""

from dyad.start import start

if __name__ == "__main__":
    start("dyad.evaluation.mine")
