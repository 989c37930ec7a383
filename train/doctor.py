"""Entry point of `python -m train.doctor`, which checks this machine; see dyad/doctor/main.py."""

from dyad.start import start

if __name__ == "__main__":
    start("dyad.doctor.main")
