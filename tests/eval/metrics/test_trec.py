"""Measures against ir_measures and pytrec_eval on the same files; every format in, out and damaged."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import ir_measures
import numpy as np
import pytest
import pytrec_eval
from helpers.messages import raises
from helpers.passages import read_qrels, read_run

from dyad.data.base.errors import DataError
from dyad.eval.metrics.trec import (
    Qrels,
    Run,
    beir_result,
    measures,
    ranked,
    write_dpr,
    write_qrels,
    write_run,
)
from dyad.eval.tasks.question_passage.question_sets import MAX_GRADE

# our name → pytrec_eval's own
NAMES = {
    "nDCG": "ndcg",
    "nDCG@1": "ndcg_cut_1",
    "nDCG@10": "ndcg_cut_10",
    "MAP": "map",
    "MAP@100": "map_cut_100",
    "MRR": "recip_rank",
    "Recall@10": "recall_10",
    "Recall@100": "recall_100",
    "P@5": "P_5",
    "Success@1": "success_1",
    "Success@20": "success_20",
}


def mean(values: dict[str, dict[str, float]]) -> dict[str, float]:
    return {name: fmean(of.values()) for name, of in values.items()}


def random_case(seed: int, ties: bool) -> tuple[Qrels, Run]:
    """12 queries, 40 documents: graded and negative judgements, unjudged and missing documents, ids of the queries
    in the corpus; two judged queries without results, one answered without judgements, one without a right document."""
    draw = random.Random(seed)
    documents = [*(f"d{i}" for i in range(30)), "D", "é", "日本", "😀", *(f"q{i}" for i in range(6))]
    score = (lambda: float(draw.randrange(-2, 3))) if ties else (lambda: draw.uniform(-1, 1))
    qrels = {f"q{i}": {d: draw.choice([-1, 0, 0, 1, 1, 2, 5]) for d in draw.sample(documents, 12)} for i in range(11)}
    qrels["q3"] = dict.fromkeys(qrels["q3"], 0)
    run = {f"q{i}": {d: score() for d in draw.sample(documents, draw.randrange(1, 40))} for i in range(2, 12)}
    run["q4"] = {}
    return qrels, run


def of_pytrec_eval(qrels: Qrels, run: Run) -> dict[str, dict[str, float]]:
    """{our name: {query: value}}, zero for what pytrec_eval leaves out."""
    found = pytrec_eval.RelevanceEvaluator(qrels, set(NAMES.values())).evaluate(run)
    return {ours: {q: found.get(q, {}).get(theirs, 0.0) for q in qrels} for ours, theirs in NAMES.items()}


def of_ir_measures(qrels: Path, run: Path, names: list[str]) -> dict[str, dict[str, float]]:
    parsed = {ir_measures.parse_measure(name): name for name in names}
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    judged = list(ir_measures.read_trec_qrels(str(qrels)))
    for metric in ir_measures.iter_calc(list(parsed), judged, list(ir_measures.read_trec_run(str(run)))):
        found[parsed[metric.measure]][metric.query_id] = float(metric.value)
    return found


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_measures_equal_pytrec_eval(seed: int, ties: bool) -> None:
    qrels, run = random_case(seed, ties)
    found = measures(qrels, run, NAMES)
    assert found == of_pytrec_eval(qrels, run)
    assert 0 < mean(found)["nDCG@10"] < 1
    assert found["MAP"]["q0"] == found["Recall@100"]["q4"] == found["P@5"]["q3"] == 0


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_whoever_reads_our_files_finds_our_values(seed: int, ties: bool, tmp_path: Path) -> None:
    """pytrec_eval, ir_measures (MS MARCO's MRR@k breaks ties the other way), and the order of the lines."""
    qrels, run = random_case(seed, ties)
    write_run(tmp_path / "run", run, "t")
    write_qrels(tmp_path / "qrels", qrels)
    names = [*NAMES, "MRR@10", "MRR@3"]
    ours = measures(qrels, run, names)
    assert of_ir_measures(tmp_path / "qrels", tmp_path / "run", names) == ours
    with open(tmp_path / "run") as lines, open(tmp_path / "qrels") as judged:
        theirs = of_pytrec_eval(pytrec_eval.parse_qrel(judged), pytrec_eval.parse_run(lines))
    assert theirs == {name: ours[name] for name in NAMES}
    in_order: dict[str, list[str]] = {}
    for line in (tmp_path / "run").read_text().splitlines():
        query, _, document, rank, *_ = line.split()
        in_order.setdefault(query, []).append(document)
        assert int(rank) == len(in_order[query])
    for query, documents in in_order.items():
        rank = next((i for i, d in enumerate(documents, 1) if qrels.get(query, {}).get(d, 0) > 0), math.inf)
        if query in qrels:
            assert ours["MRR"][query] == ours["MRR@10"][query] * (rank <= 10) + (rank > 10) / rank


def test_mrr_at_10_has_the_order_of_all_other_measures() -> None:
    """ir_measures on the tied run itself: MS MARCO's code puts a before b, trec_eval b before a."""
    qrels, run = {"q": {"b": 1}}, {"q": {"a": 1.0, "b": 1.0}}
    assert ir_measures.calc_aggregate([ir_measures.RR @ 10], qrels, run)[ir_measures.RR @ 10] == 0.5
    names = ["MRR@10", "MRR", "nDCG@1"]
    assert measures(qrels, run, names) == {name: {"q": 1} for name in names}


def test_scores_are_float32_and_ties_go_by_descending_id() -> None:
    assert [d for d, _ in ranked({"a": 1.0, "b": 1.0 - 1e-9, "c": 1.0 - 1e-6, "B": 1.0})] == ["b", "a", "B", "c"]
    assert [d for d, _ in ranked({"é": 0.0, "z": -0.0, "😀": 0.0, "\uffff": 0.0})] == ["😀", "\uffff", "é", "z"]
    assert ranked({"a": 3, "b": 2, "c": 1}, 2) == [("a", 3.0), ("b", 2.0)]
    assert ranked({}) == []


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.0, 1e-45, -3.7e-39, 123456.7, 3e38])
def test_equal_scores_are_set_apart_by_single_steps(value: float) -> None:
    best = float(np.nextafter(np.float32(value), np.float32(np.inf)))
    found = ranked({"x": best, **{f"{i:03}": value for i in range(200)}, "y": -3.3e38})
    scores = np.array([s for _, s in found], np.float32)
    expected = [np.float32(best)]
    while len(expected) < 201:
        expected.append(np.nextafter(expected[-1], np.float32(-np.inf)))
    np.testing.assert_array_equal(scores[:201], np.array(expected))
    assert found[0][0] == "x" and found[-1][0] == "y" and scores[200] > scores[201]


def test_steps_push_on_what_stands_close_below() -> None:
    below = float(np.nextafter(np.float32(1), np.float32(0)))
    found = ranked({"a": 1.0, "b": 1.0, "c": 1.0, "d": below, "e": 0.5})
    assert [d for d, _ in found] == ["c", "b", "a", "d", "e"]
    assert (np.diff([s for _, s in found]) < 0).all() and found[-1] == ("e", 0.5)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_refused(score: float) -> None:
    with raises(AssertionError, "float32"):
        ranked({"a": 1.0, "b": score})


def test_own_ids_stay() -> None:
    """A query that finds itself first: BEIR drops it, ir_measures and we do not."""
    qrels, run = {"q": {"d": 1}, "r": {"d": 1}}, {"q": {"q": 2.0, "d": 1.0}, "r": {"q": 2.0, "d": 1.0}}
    assert mean(measures(qrels, run, ["MRR@10", "Success@1"])) == {"MRR@10": 0.5, "Success@1": 0.0}


def test_by_hand() -> None:
    """Grades 2 and 1 found at ranks 3 and 1, a third right document not found, a second query without results."""
    qrels = {"1": {"a": 1, "b": 0, "c": 2, "z": 1}, "2": {"a": 1}}
    run = {"1": {"a": 3.0, "b": 2.0, "c": 1.0}, "9": {"a": 1.0}}
    found = mean(measures(qrels, run, ["nDCG@10", "MAP@10", "Recall@2", "P@3", "MRR@10"]))
    ideal = 2 + 1 / math.log2(3) + 1 / 2
    expected = {"nDCG@10": (1 + 2 / 2) / ideal, "MAP@10": (1 + 2 / 3) / 3, "Recall@2": 1 / 3, "P@3": 2 / 3, "MRR@10": 1}
    assert found == pytest.approx({name: value / 2 for name, value in expected.items()})
    assert measures({}, run, ["MAP"]) == {"MAP": {}} and measures(qrels, {}, ["MAP"]) == {"MAP": {"1": 0, "2": 0}}


def test_beir_result_is_rounded_means() -> None:
    qrels, run = random_case(0, ties=True)
    found = beir_result(qrels, run, (1, 10))
    assert [list(v) for v in found.values()] == [
        [f"{n}@1", f"{n}@10"] for n in ("NDCG", "MAP", "Recall", "P", "MRR")
    ] and list(found) == ["ndcg", "map", "recall", "precision", "mrr"]
    values = of_pytrec_eval(qrels, run)["nDCG@10"].values()
    assert found["ndcg"]["NDCG@10"] == round(sum(values) / len(qrels), 5) > 0
    assert found["recall"]["Recall@10"] == round(mean(measures(qrels, run, ["Recall@10"]))["Recall@10"], 5)


# ---- files ---------------------------------------------------------------------------------------------------------


def test_runs_come_back_in_order_and_to_the_float32(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    scores = draw.standard_normal(2000) * 10.0 ** draw.integers(-30, 30, 2000)
    run = {"q": {f"d{i}": float(s) for i, s in enumerate(scores)}, "é": {"日本": 0.1}}
    write_run(tmp_path / "run", run, "tag")
    found = read_run(tmp_path / "run")
    assert list(found) == ["q", "é"] and list(found["q"]) == [d for d, _ in ranked(run["q"])]
    for query, of_query in run.items():
        for document, score in of_query.items():
            assert np.float32(found[query][document]) == np.float32(score)
    assert (tmp_path / "run").read_bytes().splitlines()[-1].decode() == "é Q0 日本 1 0.100000001 tag"
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_judgements_come_back(tmp_path: Path) -> None:
    qrels = {"q1": {"d1": 1, "日本": -1}, "q2": {"d": 0}}
    write_qrels(tmp_path / "qrels", qrels)
    assert read_qrels(tmp_path / "qrels") == qrels
    assert (tmp_path / "qrels").read_text().splitlines()[0] == "q1 0 d1 1"


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    for name in ("a b", "", "\ud800", "a\n", "a\u00a0b", "a\u2003b", "a\x85b", "a\x1cb"):
        with raises(DataError, repr(name)):
            write_run(tmp_path / "run", {"q": {name: 1.0}}, "t")
        with raises(DataError, repr(name)):
            write_qrels(tmp_path / "qrels", {name: {"d": 1}})
    assert list(tmp_path.iterdir()) == []


def test_dpr_output_is_one_json_list_written_row_by_row(tmp_path: Path) -> None:
    seen: list[bool] = []

    def rows() -> Iterator[dict[str, Any]]:
        for i in range(3):
            seen.append((tmp_path / "out.json").exists())
            yield {"question": f"who {i}?", "answers": ["Ada", "é"], "ctxs": [{"text": 'a "b"\n\ud800'}] * i}

    write_dpr(tmp_path / "out.json", rows())
    found = json.loads((tmp_path / "out.json").read_text())
    context = {"text": 'a "b"\n\ud800'}
    assert found[2] == {"question": "who 2?", "answers": ["Ada", "é"], "ctxs": [context, context]}
    assert [len(row["ctxs"]) for row in found] == [0, 1, 2] and seen == [False] * 3
    assert len((tmp_path / "out.json").read_text().splitlines()) == 5
    write_dpr(tmp_path / "none.json", [])
    assert json.loads((tmp_path / "none.json").read_text()) == []


def test_largest_grade_costs_no_memory() -> None:
    found = measures({"q": {"d": MAX_GRADE, "e": 1}}, {"q": {"d": 1.0, "e": 0.5}}, ["nDCG@10", "MAP", "Recall@5"])
    assert found == {"nDCG@10": {"q": 1}, "MAP": {"q": 1}, "Recall@5": {"q": 1}}
