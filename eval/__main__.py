"""python -m eval: evaluates, see dyad/eval/run/main.py."""

from dyad.data.base.errors import run
from dyad.eval.run.main import main

if __name__ == "__main__":
    run(main)
