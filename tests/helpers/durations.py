"""The seconds that each test file takes, in tests/durations.md, and what is chosen by them.

Processes take the files in that order, the longest first, so that none waits at the end. `bash launch/test.sh --fast`
runs changed and new test files, those of changed folders, then the files with the least seconds a test, as many as
SHARE has room for.
`bash launch/test.sh --durations` runs everything and writes the table; what stands in its last column stays.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from helpers.cli import ROOT

TABLE = ROOT / "tests" / "durations.md"
SHARE = 0.035  # of the seconds of all files, whatever machine the table is of
HEAD = """# Seconds of each test file

`bash launch/test.sh --durations` writes this table on an idle machine, and `tests/helpers/durations.py` reads it.

| seconds | tests | file | what takes the time |
| ---: | ---: | --- | --- |
"""


@dataclass(frozen=True)
class Row:
    """A test file. path: below the repository's root."""

    seconds: float
    tests: int
    path: str
    why: str = ""


def read() -> list[Row]:
    """Return the rows of tests/durations.md, in its order."""
    lines = (line.strip("|").split("|") for line in TABLE.read_text().splitlines() if line.startswith("| "))
    cells = [[cell.strip() for cell in line] for line in lines]
    return [Row(float(seconds), int(tests), path, why) for seconds, tests, path, why in cells[2:]]


def write(seconds: Mapping[str, list[float]]) -> None:
    """Write tests/durations.md, longest first. seconds: file → those of each test, with set-up and clean-up."""
    why = {row.path: row.why for row in read()}
    rows = [Row(sum(tests), len(tests), path, why.get(path, "")) for path, tests in seconds.items()]
    rows.sort(key=lambda row: -row.seconds)
    TABLE.write_text(HEAD + "".join(f"| {r.seconds:.1f} | {r.tests} | {r.path} | {r.why} |\n" for r in rows))


def fast(changed: Collection[str]) -> Iterator[str]:
    """Yield the paths of test files to run for a commit that changes these paths.

    First those that are changed or new, whatever they take; then those in the folders that mirror the paths, then
    those with the least seconds a test, as SHARE has room.
    """
    own = {path for path in changed if Path(path).name.startswith("test_") and (ROOT / path).exists()}
    yield from sorted(own)
    folders, rows = {mirror(path) for path in changed}, [row for row in read() if row.path not in own]
    left = SHARE * sum(row.seconds for row in rows)
    for row in sorted(rows, key=lambda r: (str(Path(r.path).parent) not in folders, r.seconds / r.tests)):
        if row.seconds <= left and (ROOT / row.path).exists():
            left -= row.seconds
            yield row.path


def mirror(path: str) -> str:
    """The folder of the tests of a source file: that of train/step/chunks.py is tests/train/step."""
    folder = str(Path(path).parent)
    return folder if folder.startswith("tests") else f"tests/{folder}"


def changed_paths() -> list[str]:
    """What differs from the last commit, or, if nothing does, what the commits of this branch changed; on the branch
    main, what the last commit changed."""

    def git(command: str) -> list[str]:
        return subprocess.run(["git", *command.split()], cwd=ROOT, capture_output=True, text=True).stdout.split()

    (head,), base = git("rev-parse HEAD"), git("merge-base HEAD main")
    before = "HEAD~1" if base in ([], [head]) else base[0]
    unsaved = git("diff --name-only HEAD") + git("ls-files --others --exclude-standard")
    return unsaved or git(f"diff --name-only {before}")


if __name__ == "__main__":
    print(*fast(changed_paths()), sep="\n")
