"""`python -m train.doctor`: check that this machine is ready for a run, or translate a command line of open_clip."""
