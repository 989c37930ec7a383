"""The entry point of python -m eval.mine. The command is in dyad/evaluation/mine.py."""

from dyad.start import start

if __name__ == "__main__":
    start("dyad.evaluation.mine")
