"""Find the licence texts of data: NOTICE, LICENSE, COPYING and README files in the folders of the data.

Reports and exported models quote these texts. Does not import torch.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dyad.data.base.files import file_inside, open_foreign
from dyad.data.shards.sources import local_path, written_sources
from dyad.data.shards.storage import scheme_of

NAMES = re.compile(r"(NOTICE|LICEN[CS]E|COPYING|README)[^/]*", re.IGNORECASE)
SUFFIXES = ("", ".md", ".txt", ".rst")
PROGRAM = ("pyproject.toml", "setup.py")  # a LICENSE beside one of these is the licence of a program, not of the data
SUITE_KIND = re.compile(r"(?!pipe:)\w+:(?!:|//)")  # "beir:" of the entry "beir:FOLDER" of eval.suite; no URL
LEVELS = 2  # number of folders above the folder of the data that are searched
LARGEST = 1 << 16  # bytes of one licence file that are read


@dataclass(frozen=True)
class Notice:
    """A licence text found near data. source: the configured value that names the data, such as that of data.train;
    file: path of the licence file; text: its first LARGEST bytes, then a line that says so if the file is longer."""

    source: str
    file: str
    text: str


def notices(values: Sequence[str | Path]) -> list[Notice]:
    """Return the licence texts near the data that `values` name, each file once.

    values: texts that name data: paths, globs or URLs, joined by '::', each with an optional weight ('a.tar@2'). A
    value may begin with a kind of evaluation, such as 'beir:'. URLs and folders that cannot be listed are skipped. For
    each path the search begins in the folder of the data and goes up at most LEVELS (2) folders. It ends at the first
    folder that has licence files. It also ends, without a result, at the home folder and at a folder with a program
    (pyproject.toml, setup.py), whose licence is not that of the data. The text of a licence file that cannot be read
    says so, and why. Raises ConfigError for a value with an empty part or a wrong weight.
    """
    found: dict[str, Notice] = {}
    for value in map(str, values):
        kind = SUITE_KIND.match(value)
        for source in written_sources(value[kind.end() :] if kind and not os.path.exists(value) else value, "data"):
            for file in _notice_files(source.path):
                try:
                    with open_foreign(file) as stream:
                        content = stream.read(LARGEST + 1)
                except OSError as error:
                    content = f"(cannot be read: {error.strerror})".encode()
                text = content[:LARGEST].decode(errors="replace").strip()
                if len(content) > LARGEST:
                    text += f"\n… (cut: {file.stat().st_size:,} bytes)"
                found.setdefault(os.path.realpath(file), Notice(value, str(file), text))
    return list(found.values())


def _notice_files(path: str) -> list[Path]:
    """Return the licence files of the nearest folder that has any, from the data file or folder `path` upwards.

    At most LEVELS (2) folders above it are searched. The order is NOTICE, LICENSE, COPYING, README. The list is empty
    for a URL, and where `notices` ends the search without a result.
    """
    if scheme_of(path):
        return []
    data = Path(local_path(path)).absolute()
    with suppress(OSError):  # a folder that cannot be listed
        if not data.exists():  # the path may end in the name of a split, as FOLDER@SPLIT
            data = Path(str(data).rpartition("@")[0] or data)
        first = data if data.is_dir() else data.parent
        for folder in (first, *first.parents[:LEVELS]):
            if not folder.is_dir():  # as for a path with braces
                continue
            if folder == Path.home() or any((folder / name).exists() for name in PROGRAM):
                return []
            files = [f for f in folder.iterdir() if NAMES.fullmatch(f.name) and f.suffix.lower() in SUFFIXES]
            if regular := [file for file in files if file_inside(folder, file.name)]:
                return sorted(regular, key=lambda file: ("NLCR".index(file.name[0].upper()), file.name))
    return []
