"""`python -m data build NAME`: the data sets in data/samples, made again from pinned packages, byte for byte."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from data.build_emoji import build_emoji
from data.errors import ConfigError, DataError, nearest
from data.packages import sha256

SUMS = "SHA256SUMS"
SAMPLES = Path(__file__).parent / "samples"
BUILDERS: dict[str, Callable[[Path, Path], None]] = {"emoji": build_emoji}  # (folder to fill, scratch folder)


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
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(fresh.iterdir()):
            shutil.copyfile(path, folder / path.name)
    print(f"{folder}: {len(list(folder.glob('*.tar')))} shards, {SUMS} holds their checksums")


def verify(folder: Path, sums: str) -> None:
    """Compare the files of a folder with lines 'sha256  name'; DataError names all that are missing or differ."""
    expected = {name: digest for digest, name in (line.split("  ") for line in sums.splitlines())}
    wrong = [name for name, digest in expected.items() if sha256(folder / name) != digest]
    if wrong:
        raise DataError(
            f"{folder}: not the bytes that {SUMS} promises: {', '.join(wrong)}. `git checkout` restores them."
        )


def _write_sums(folder: Path) -> None:
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / SUMS).write_text("".join(lines))
