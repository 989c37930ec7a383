"""The trainer. Importing this package loads nothing heavy."""

import sys
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent

for _name in ("data", "eval"):  # a stranger's folder of that name in the working folder wins silently
    _found = find_spec(_name)
    if _found is None or Path(_found.origin or "").resolve().parent.parent != _ROOT:
        _origin = _found.origin if _found else "missing"
        print(f"error: the package '{_name}' is {_origin}, not the one beside train: cd {_ROOT} first", file=sys.stderr)
        sys.exit(2)
