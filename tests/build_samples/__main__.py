"""`python -m tests.build_samples NAME`: makes a shipped data set again from pinned packages, byte for byte."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dyad.data.base.command_line import HELP, help_text, parse_options
from dyad.data.base.errors import ConfigError, DataError, nearest
from dyad.data.config import described
from dyad.process import run
from tests.build_samples.emoji import build_emoji
from tests.build_samples.packages import sha256
from tests.build_samples.topics import build_topics

PURPOSE = (
    "Make a data set of data/samples again: emoji (needs npm) or topics (needs Debian 12). pip install -e '.[build]'"
)
EXAMPLES = {
    "compare the shipped folder with a fresh build": "python -m tests.build_samples topics check=true",
    "build into another folder": "python -m tests.build_samples emoji out=/tmp/emoji",
}
SUMS = "SHA256SUMS"
SAMPLES = Path(__file__).parents[2] / "data" / "samples"
BUILDERS: dict[str, Callable[[Path, Path], None]] = {"emoji": build_emoji, "topics": build_topics}  # (folder, scratch)


@dataclass
class BuildOptions:
    """The keys of the command."""

    out: str | None = described(None, "folder to write; null: data/samples/NAME")
    check: bool = described(False, "write nothing, only compare a fresh build with the folder")


def main() -> None:
    name, *words = sys.argv[1:] or ["help"]
    if name in HELP:
        print(help_text(PURPOSE, EXAMPLES, BuildOptions))
        return
    options = parse_options(BuildOptions, words, "python -m tests.build_samples")
    build(name, options.out, options.check)


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
        files = sorted(path for path in fresh.rglob("*") if path.is_file())
        sums = "".join(f"{sha256(path)}  {path.relative_to(fresh).as_posix()}\n" for path in files)
        if check:
            verify(folder, sums)
            print(f"{folder}: the same bytes as a fresh build")
            return
        (fresh / SUMS).write_text(sums)
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


if __name__ == "__main__":
    run(main)
