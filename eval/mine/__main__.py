"""python -m eval.mine: mines hard negatives, see dyad/eval/run/mine.py."""

from dyad.data.base.errors import run
from dyad.eval.run.mine import main

if __name__ == "__main__":
    run(main)
