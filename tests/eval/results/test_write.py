"""Result files and tables: what is written, what is read back, and that it fits a terminal."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.report import passages

from dyad.data.base.errors import DataError
from dyad.data.base.files import remove
from dyad.eval.results.kinds import groups, meanings
from dyad.eval.results.panels import scored
from dyad.eval.results.write import model_facts, print_tables, result_files, saved_results, write
from dyad.train.config import TrainConfig
from dyad.train.eval_config import EvalConfig

WAYS = ("image_to_text", "text_to_image")
NAME = "a_name_of_a_data_set_that_is_much_longer_than_all_others"


def retrieval(name: str, ks: tuple[int, ...], intervals: bool) -> dict[str, Any]:
    keys = [f"{way}_R@{k}" for way in WAYS for k in ks]
    sizes = {"num_images": 31_783.0, "num_texts": 158_915.0}
    return {
        "dataset": name,
        "task": "zeroshot_retrieval",
        "metrics": {**dict.fromkeys(keys, 0.123), **{f"{way}_median_rank": 1234.0 for way in WAYS}, **sizes},
        "chance": dict.fromkeys(keys, 0.004),
        **({"intervals": {key: [0.1, 0.2] for key in keys}} if intervals else {}),
    }


def zero_shot(name: str, few: bool) -> dict[str, Any]:
    metrics = {"acc1": 0.5, "mean_per_class_recall": 0.4, **({} if few else {"acc5": 0.9})}
    return {
        "dataset": name,
        "task": "zeroshot_classification",
        "metrics": {**metrics, "num_samples": 50_000.0},
        "chance": {"acc1": 0.001, "mean_per_class_recall": 0.001, "majority_class_share": 0.02},
        "intervals": {"acc1": [0.45, 0.55], "mean_per_class_recall": None},
    }


def table(results: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_tables(results)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines), lines
    return lines


@pytest.mark.parametrize("intervals", [True, False], ids=["with intervals", "without"])
def test_retrieval_is_told_whole_in_80_columns(intervals: bool, capsys: pytest.CaptureFixture[str]) -> None:
    lines = table([retrieval("val", (1, 5, 10), intervals), retrieval(NAME, (1, 5, 10, 20, 50), intervals)], capsys)
    assert lines[0] == "val: 31,783 images, 158,915 texts"
    rows = [line.split() for line in lines if "0." in line]
    first = [["image", "→", "text", "0.123", "0.123", "0.123", "1234"], *[["95", "%", *["0.100", "0.200"] * 3]]]
    assert rows[: 1 + intervals] == first[: 1 + intervals]
    assert rows[1 + intervals] == ["chance", "0.004", "0.004", "0.004"]
    assert len(rows) == 4 * (2 + intervals)
    assert [line.split()[1:5] for line in lines if "median" in line] == [
        ["R@1", "R@5", "R@10", "median"],
        ["R@1", "R@5", "R@10", "R@20"],
    ]


def test_zero_shot_is_told_whole_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    lines = table([zero_shot("imagenet", False), zero_shot(NAME, True)], capsys)
    rows = [line.split() for line in lines if line.strip()]
    assert rows[0] == "zero-shot acc1 acc5 mean/class samples largest class".split()
    assert rows[2:5] == [
        ["imagenet", "0.500", "0.900", "0.400", "50,000", "0.020"],
        ["95", "%", "0.450", "0.550"],
        ["chance", "0.001", "0.001"],
    ]
    assert rows[5][1:4] == ["0.500", "-", "0.400"] and "".join(row[0] for row in rows[5:9]) == NAME


def test_what_an_index_found_is_named_with_its_agreement(capsys: pytest.CaptureFixture[str]) -> None:
    images, classes, few, questions = retrieval("val", (1,), True), *(zero_shot(n, False) for n in "ab"), passages()
    del images["metrics"]["image_to_text_median_rank"], images["metrics"]["text_to_image_median_rank"]
    images["search"] = {way: {"index": "HNSW32"} for way in WAYS}
    images["metrics"] |= {f"{way}_recall_against_exact@10": 0.9 + n / 20 for n, way in enumerate(WAYS)}
    classes["search"], questions["search"] = {"index": "HNSW32"}, {"index": "PQ8", "depth": 100}
    for result in (classes, questions):
        result["metrics"]["recall_against_exact@5"] = 0.75
    few["search"] = {"index": "Flat", "instead_of": "PQ8", "because": "too few"}
    lines = table([images, classes, few, questions], capsys)
    shown, names = (" ".join(" ".join(part).split()) for part in (lines, [line[:18] for line in lines]))
    assert (
        "val (approximate: index HNSW32, image → text recall against exact@10 0.900, text → image recall against "
        "exact@10 0.950): 31,783 images" in shown
    )
    assert "(approximate: index PQ8, recall against exact@5 0.750): " in shown
    assert "a (approximate: index HNSW32, recall against exact@5 0.750) 95 %" in names
    assert "b (exact: too small for index PQ8) 95 %" in names
    assert scored(classes).dataset.startswith("a (approximate: index HNSW32, ")
    assert scored(zero_shot("a", False)).dataset == "a"


def next_item(ks: tuple[int, ...], **more: Any) -> dict[str, Any]:
    keys = [*(f"{name}@{k}" for name in ("HR", "nDCG") for k in ks), "MRR"]
    return {"dataset": "test", "task": "next_item", "metrics": dict.fromkeys(keys, 0.25), **more}


def test_what_is_not_by_default_is_named_beside_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    """In the printed table, and on a card, where results of several protocols stand together."""
    usual = next_item((1,), seen="keep", history=["train.csv"])
    probed = zero_shot("a", True) | {"probe": {"features": "embeddings", "k": 20, "C": 1.0}}
    cut = retrieval("val", (1,), True) | {"truth": "pairs", "width": 64}
    results = [usual, next_item((1,), seen="drop"), probed, cut]
    named = ["test", "test (seen=drop)", "a (probe_features=embeddings)", "val (truth=pairs, width=64)"]
    assert [scored(result).dataset for result in results] == named
    shown = "\n".join(table(results, capsys))
    assert all(f"{name}: " in shown for name in (*named[:2], named[3]))


@pytest.mark.parametrize(
    ("ks", "columns"),
    [
        ((1, 5, 10), "HR@1 HR@10 nDCG@10 MRR"),
        ((1, 20), "HR@1 HR@20 nDCG@20 MRR"),
        ((5,), "HR@5 nDCG@5 MRR"),
        ((1,), "HR@1 nDCG@1 MRR"),
    ],
)
def test_next_items_are_shown_up_to_the_last_k(
    ks: tuple[int, ...], columns: str, capsys: pytest.CaptureFixture[str]
) -> None:
    head = next(line for line in table([next_item(ks)], capsys) if line.lstrip().startswith("next item"))
    assert head.split() == ["next", "item", *columns.split()]


def test_a_result_always_has_its_width() -> None:
    """So that a result without one, of an older version, has an unknown one."""
    cut = replace(TrainConfig(), eval=EvalConfig(width=64))
    assert [model_facts(config, "here", None)["width"] for config in (TrainConfig(), cut)] == [None, 64]


def test_results_are_read_back_and_files_of_others_are_passed_over(tmp_path: Path, capsys) -> None:
    result = retrieval("val", (1,), True)
    folder = tmp_path / "eval"
    named = {**result, "dataset": "nq.dpr"}  # not a file for other tools
    assert write(folder, named, {".dpr.json": lambda p: p.touch()})[0] == folder / "nq.dpr.json"
    assert write(folder, result, {}) == [folder / "val.json"]
    for name, text in {"a.json": "{", "b.json": "[]", "c.json": '{"task": "other"}', "val.beir.json": "{}"}.items():
        (folder / name).write_text(text)
    (folder / "val.pictures").mkdir()
    assert {"eval/val.beir.json", "eval/nq.dpr.dpr.json"}.isdisjoint(result_files(tmp_path))
    assert saved_results(tmp_path) == [named, result] and saved_results(tmp_path / "none") == []
    print_tables(saved_results(tmp_path))
    assert "image → text" in capsys.readouterr().out


def test_saved_results_of_another_shape_are_told_as_far_as_they_go(tmp_path: Path, capsys) -> None:
    (tmp_path / "eval").mkdir()
    for result in (retrieval("[/a]", (1,), True), zero_shot("z", False), passages()):
        for name in result.keys() - {"dataset", "task"} | {"search", "difference"}:
            inner = [dict.fromkeys(result[name])] if isinstance(result.get(name), dict) else []
            for value in [{}, *inner] if name == "metrics" else [None, 7, {}, *inner]:
                (tmp_path / "eval/val.json").write_text(json.dumps({**result, name: value}))
                print_tables(saved_results(tmp_path))
    told = capsys.readouterr()
    assert "search is left out" in told.err and "[/a]: 31,783 images" in told.out


def test_what_cannot_be_written_beside_is_left_out_with_a_line(tmp_path: Path, capsys) -> None:
    def broken(path: Path) -> None:
        raise DataError("sample 'x' is damaged")

    written = write(tmp_path, retrieval("val", (1,), True), {".pictures": broken, ".txt": lambda p: p.touch()})
    assert written == [tmp_path / "val.json", tmp_path / "val.txt"]
    assert capsys.readouterr().err == "left out: sample 'x' is damaged\n"
    assert json.loads(written[0].read_text())["dataset"] == "val"


def test_a_folder_without_thumbnails_is_not_listed(tmp_path: Path) -> None:
    """examples=0 shows no image: the thumbnails of an earlier result are removed."""
    (tmp_path / "val.pictures").mkdir()
    written = write(tmp_path, retrieval("val", (1,), True), {".pictures": remove})
    assert written == [tmp_path / "val.json"] == [*tmp_path.iterdir()]


def test_what_an_auc_means_names_no_probe_and_no_rate() -> None:
    metrics = {"auc": 0.9, "partial_auc@0.05": 0.8, "partial_auc@0.3": 0.8}
    told = meanings(groups({"dataset": "val", "task": "rare_class", "metrics": metrics, "chance": {}}))
    assert [text.partition(" ")[0] for text in told] == ["AUC,", "Partial"]
    assert not any(word in text for text in told for word in ("probe", "%"))
