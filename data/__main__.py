"""python -m data: the data command, see dyad/data/cli/main.py."""

from dyad.data.base.errors import run
from dyad.data.cli.main import main

if __name__ == "__main__":
    run(main)
