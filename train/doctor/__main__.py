"""Entry point of `python -m train.doctor`, which checks this machine; see dyad/train/doctor/main.py."""

from dyad.data.base.errors import run
from dyad.train.doctor.main import main

if __name__ == "__main__":
    run(main)
