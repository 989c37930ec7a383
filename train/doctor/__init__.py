"""python -m train.doctor: is this machine ready, and ready for this run?"""
