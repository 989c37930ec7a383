"""The entry point of python -m eval, which evaluates a checkpoint. The command is in dyad/eval/run/main.py."""

from dyad.data.base.errors import run
from dyad.eval.run.main import main

if __name__ == "__main__":
    run(main)
