"""python -m train.export: a trained model as a folder that another library loads."""
