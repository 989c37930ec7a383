"""Evaluation of dual encoders. Importing this package loads nothing heavy."""

import train  # noqa: F401  (which refuses a stranger's data/ in the working folder)
