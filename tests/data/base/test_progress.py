"""Progress on standard error, and on a terminal as a bar."""

from __future__ import annotations

import pytest

from dyad.data.base import progress


def test_tracked_items_come_with_lines_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(progress.tracked("ab", "Read", 2)) == ["a", "b"]
    assert capsys.readouterr() == ("", ""), "a short pass prints nothing"
    monkeypatch.setattr(progress, "EVERY", 0.0)
    assert list(progress.tracked("ab", "Read", 2)) == ["a", "b"]
    printed = capsys.readouterr()
    assert printed.out == "" and [line[:16] for line in printed.err.splitlines()] == [
        "Read [1/2 (50%)]",
        "Read [2/2 (100%)",
    ]


def test_tracked_items_move_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "on_terminal", lambda stream: True)
    assert list(progress.tracked(iter(range(3)), "Read", 3)) == [0, 1, 2]
    printed = capsys.readouterr()
    assert printed.out == "" and "3/3" in printed.err
