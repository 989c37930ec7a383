"""Entry point of `python -m data`. The command itself is in dyad/data/cli/main.py."""

from dyad.data.base.errors import run
from dyad.data.cli.main import main

if __name__ == "__main__":
    run(main)
