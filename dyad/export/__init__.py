"""`python -m train.export`: write a trained model in the format of another library, and check it with that library."""
