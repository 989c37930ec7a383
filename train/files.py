"""Writes that are there whole or not at all, also after a power cut."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Wait until the disk holds `path`, a file (its bytes) or a folder (its names)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, content: bytes) -> None:
    """Put `content` at `path` in one move: a reader, or a crash, finds the old file or the new one."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_bytes(content)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    replace(path, (json.dumps(value, indent=1) + "\n").encode())
