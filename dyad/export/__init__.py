"""`python -m train.export`: write a trained model in a format that another library loads, and check it there."""
