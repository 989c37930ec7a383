"""Entry point of `python -m train`, which trains; see dyad/run/main.py."""

from dyad.start import start

if __name__ == "__main__":
    start("dyad.run.main")
