"""The comparison of an export in this process, which has the libraries already: a process of its own takes seconds."""

from pathlib import Path

import pytest

from dyad.export import reload


def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on an export is loaded here. What loads it is the same; one export of each format does without this."""

    def load_here(library: str, folder: Path, job: Path) -> None:
        reload.main(library, str(folder), job)

    monkeypatch.setattr("dyad.export.library.in_a_clean_process", load_here)
