"""`python -m train.doctor`: is this machine ready for that run? And translation of open_clip's command lines."""
