"""`python -m train.export`: write a trained model for another library, see dyad/export/main.py."""

from dyad.start import start

if __name__ == "__main__":
    start("dyad.export.main")
