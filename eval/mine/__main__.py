"""The command python -m eval.mine, which mines hard negatives. Its main function is in dyad/eval/run/mine.py."""

from dyad.data.base.errors import run
from dyad.eval.run.mine import main

if __name__ == "__main__":
    run(main)
