"""python -m train.doctor: is this machine ready? See dyad/train/doctor/main.py."""

from dyad.data.base.errors import run
from dyad.train.doctor.main import main

if __name__ == "__main__":
    run(main)
