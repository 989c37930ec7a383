"""`python -m data` in a process of its own, and in this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dyad.data.base.errors import run
from dyad.data.cli.main import main


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A real second process."""
    return subprocess.run([sys.executable, "-m", "data", *map(str, arguments)], capture_output=True, text=True)


def here(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    """The same in this process."""
    monkeypatch.setattr(sys, "argv", ["data", *map(str, arguments)])
    main()


def code_of(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["data", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        run(main)
    return int(caught.value.code or 0)
