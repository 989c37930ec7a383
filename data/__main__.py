"""Entry point of `python -m data`. The command itself is in dyad/data/cli/main.py."""

from dyad.start import start

if __name__ == "__main__":
    start("dyad.data.cli.main")
