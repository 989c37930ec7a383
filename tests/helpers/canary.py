"""What tells that a stranger's file was executed."""

from pathlib import Path
from typing import Any


class Canary:
    """An object whose unpickling makes the file `path`, which tells that a pickle was loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")
