"""Entry point of `python -m train`, which trains; see dyad/train/run/main.py."""

from dyad.data.base.errors import run
from dyad.train.run.main import main

if __name__ == "__main__":
    run(main)
