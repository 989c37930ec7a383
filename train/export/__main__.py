"""`python -m train.export`: write a trained model for another library, see dyad/train/export/main.py."""

from dyad.start import start

if __name__ == "__main__":
    start("dyad.train.export.main")
