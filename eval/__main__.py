"""The entry point of python -m eval, which evaluates a checkpoint. The command is in dyad/evaluation/main.py."""

from dyad.start import start

if __name__ == "__main__":
    start("dyad.evaluation.main")
