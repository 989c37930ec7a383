"""Whose work the data are: the NOTICE, LICENSE and README files that lie beside them. Torch-free.

Whoever shows a model's results, or hands the model on, shows these with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data.foreign import own_file
from data.sources import local_path, parts
from data.storage import scheme_of

NAMES = re.compile(r"(NOTICE|LICEN[CS]E|COPYING|README)[^/]*", re.IGNORECASE)
SUFFIXES = ("", ".md", ".txt", ".rst")
PROGRAM = ("pyproject.toml", "setup.py")  # what speaks beside these speaks of the program, not of the data
LEVELS = 2  # folders above the one that holds the data
LARGEST = 1 << 16  # bytes of one file


@dataclass(frozen=True)
class Notice:
    """source: the value that led here; file: its path; text: what it says, at most LARGEST bytes of it."""

    source: str
    file: str
    text: str


def notices(values: Sequence[str | Path]) -> list[Notice]:
    """What lies beside the data that `values` name, each file once; [] when nothing does.

    values: written as data.train or as entries of eval.suite; what is not on this disk is passed over. Of each the
    nearest folder counts that has such a file: the data's own, or at most LEVELS above.
    """
    found: dict[str, Notice] = {}
    for value in map(str, values):
        path = re.sub(r"^[a-z_]+:(?!//|:)", "", value)  # without the kind of an entry of eval.suite
        for place, _ in parts(path, "data"):
            for file in _beside(place):
                found.setdefault(os.path.realpath(file), Notice(value, str(file), _text(file)))
    return list(found.values())


def _beside(place: str) -> list[Path]:
    """The files of the nearest folder that has any, in the order of NAMES."""
    if scheme_of(place):
        return []
    with suppress(OSError):  # a folder that may not be listed says nothing
        for folder in _folders(Path(local_path(place)).absolute()):
            if folder == Path.home() or any((folder / name).exists() for name in PROGRAM):
                return []
            files = [f for f in folder.iterdir() if NAMES.fullmatch(f.name) and f.suffix.lower() in SUFFIXES]
            if own := [file for file in files if own_file(folder, file.name)]:
                return sorted(own, key=lambda file: (_rank(file), file.name))
    return []


def _folders(path: Path) -> Iterator[Path]:
    """The folder of the data and those above it. What follows an @ may be a split; a part with braces is no folder."""
    whole = path if path.exists() else Path(str(path).rpartition("@")[0] or path)
    first = whole if whole.is_dir() else whole.parent
    return (folder for folder in (first, *first.parents[:LEVELS]) if folder.is_dir())


def _rank(file: Path) -> int:
    return "NLCR".index(file.name[0].upper())


def _text(file: Path) -> str:
    with file.open("rb") as stream:
        content = stream.read(LARGEST + 1)
    text = content[:LARGEST].decode(errors="replace").strip()
    return f"{text}\n… (cut: {file.stat().st_size:,} bytes)" if len(content) > LARGEST else text
