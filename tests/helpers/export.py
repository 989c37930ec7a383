"""The comparison of an export in this process, which has the libraries already: a process of its own takes seconds.

`python -m helpers.export run=… …` is `python -m train.export` with that comparison.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING

from dyad.export import library, reload

if TYPE_CHECKING:
    import pytest


def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the comparison of exports run in this process, for the rest of the test.

    The code that loads an export is the same; the tests have one export of each format without this.
    """
    monkeypatch.setattr(library, "in_a_clean_process", load_here)


def load_here(name: str, folder: Path, job: Path) -> None:
    """Stand in for library.in_a_clean_process: load the export and compare it in this process."""
    reload.main(name, str(folder), job)


if __name__ == "__main__":
    library.in_a_clean_process = load_here
    runpy.run_module("train.export", run_name="__main__", alter_sys=True)
