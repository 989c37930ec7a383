"""`python -m data` in a process of its own, and in this one."""

from __future__ import annotations

import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from dyad.data.cli.main import main
from dyad.process import run


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m data` in a process of its own, and return its exit code and output."""
    return subprocess.run([sys.executable, "-m", "data", *map(str, arguments)], capture_output=True, text=True)


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m data` in this process, without the seconds of imports; return its exit code and output."""
    monkeypatch.setattr(sys, "argv", ["data", *map(str, arguments)])
    code: Any = 0
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            run(main)
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def here(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    """Run `python -m data` in this process, and let its errors through."""
    monkeypatch.setattr(sys, "argv", ["data", *map(str, arguments)])
    main()


def code_of(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run `python -m data` in this process, which must exit, and return the exit code."""
    monkeypatch.setattr(sys, "argv", ["data", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        run(main)
    return int(caught.value.code or 0)
