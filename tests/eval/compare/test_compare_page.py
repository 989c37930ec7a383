"""python -m eval.compare page=FILE: the table, the runs over seeds, and the curves of several runs in one chart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.report import CONFIG, HOSTILE, Seen, records, retrieval, write_run, zero_shot

from dyad.eval.compare.main import main
from dyad.eval.compare.page import shared_charts
from dyad.eval.report.run_folder import read_run


def write_runs(folder: Path, count: int = 3) -> list[Path]:
    """Runs with other losses and seeds, the last one with a loss of its own name; the first has a report."""
    runs = []
    for n in range(count):
        result, data = retrieval(), {**CONFIG["data"], "train": HOSTILE if n == 2 else "a.tar"}
        result["metrics"]["image_to_text_R@1"] = n / 8
        keys: dict[str, Any] = {**CONFIG, "seed": n, "data": data}
        runs.append(write_run(folder / f"run-{n}", records(loss=2.0 + n), [result, zero_shot()], keys))
    (runs[0] / "report.html").touch()
    return runs


def page_of(runs: list[Path], out: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr("sys.argv", ["eval.compare", *map(str, runs), f"page={out}"])
    main()
    return out.read_text()


def test_table_seeds_and_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    text = page_of(write_runs(tmp_path), tmp_path / "runs.html", monkeypatch)
    assert capsys.readouterr().out.splitlines()[-1] == f"Written: {tmp_path / 'runs.html'}"
    seen = Seen()
    seen.feed(text)
    rows = dict(seen.rows[": "])
    assert list(rows) == ["run-2", "run-1", "run-0"] and [values[0] for values in rows.values()] == [0.25, 0.125, 0.0]
    assert ("a", "href", "run-0/report.html") in seen.attributes and text.count("report.html") == 1
    assert not {"script", "img", "link rel"} & seen.tags and HOSTILE.split("\x01")[0] in "".join(seen.texts)
    seeds = text[text.index('id="seeds"') : text.index('id="curves"')]
    assert re.findall(r'scope="row">(.*?)</th>', seeds) == ["data.train=a.tar"] * 2 and "± 0.088" in seeds
    assert "<b>Loss</b>" in text and "<b>Learning rate</b>" not in text  # which all have alike
    assert "default-src 'none'" in text


def test_a_run_has_one_colour_in_all_charts(tmp_path: Path) -> None:
    first, second, third = (read_run(run) for run in write_runs(tmp_path))
    second.history["train/samples_per_second"][10] = 1.0  # type: ignore[index]
    third.history["train/loss"].clear()  # type: ignore[attr-defined]
    charts = shared_charts({"a": first, "b": third, "c": second})
    assert [(line.label, line.colour) for line in charts["Loss"].series] == [("a", 0), ("c", 2)]
    assert [line.colour for line in charts["Throughput"].series] == [0, 1, 2] and "val" not in charts
    assert shared_charts({"a": first}) == {}


def test_more_runs_than_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page_of(write_runs(tmp_path, 8), tmp_path / "runs.html", monkeypatch)
    assert "of the first 6 runs of the table" in text and text.count('scope="row"') == 8 + 2
    figure = text[text.index("<b>Loss</b>") : text.index("</figure>", text.index("<b>Loss</b>"))]
    assert re.findall(r'"key line-(\d)">(.*?)<', figure) == [(f"{n}", f"run-{7 - n}") for n in range(6)]


def test_a_score_that_only_one_run_has_is_no_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [write_run(tmp_path / "a", results=[zero_shot()]), write_run(tmp_path / "b", results=[])]
    text = page_of(runs, tmp_path / "runs.html", monkeypatch)
    assert 'class="value best"' not in text and "*</data>" not in text


def test_a_chart_has_lines_of_one_quantity(tmp_path: Path) -> None:
    first, other = (read_run(run) for run in write_runs(tmp_path, 2))
    for name in [name for name in other.history if name.startswith("val/")]:
        del other.history[name]  # type: ignore[attr-defined]
    other.history["val/nDCG@10"] = {50: 0.1, 100: 0.2}  # type: ignore[index]
    assert "val" not in shared_charts({"a": first, "b": other})
