"""The entry point of python -m eval.compare. The command is in dyad/eval/compare/main.py."""

from dyad.start import start

if __name__ == "__main__":
    start("dyad.eval.compare.main")
