"""`python -m train.export`: write a trained model for another library, see dyad/train/export/main.py."""

from dyad.data.base.errors import run
from dyad.train.export.main import main

if __name__ == "__main__":
    run(main)
