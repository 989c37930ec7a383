"""The data sets that `python -m data build` makes again from pinned packages, byte for byte."""
