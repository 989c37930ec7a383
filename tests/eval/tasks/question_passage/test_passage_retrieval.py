"""`python -m eval` on questions and passages: every number against the files it wrote, or by hand."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ir_measures
import numpy as np
import pytest
import torch
from helpers.cli import Commands
from helpers.eval import LOCAL, check_ranking
from helpers.passages import make_run, read_qrels, read_run, write_beir

import dyad
from dyad.data.question_passage.bm25 import build_bm25
from dyad.data.question_passage.corpus import open_corpus
from dyad.eval.encode.encoder import Encoder, Evaluator
from dyad.eval.metrics.bootstrap import interval
from dyad.eval.metrics.trec import Run, measures, ranked
from dyad.eval.tasks.question_passage.passage_metrics import chance
from dyad.evaluation.load_run import load_run, read_config
from dyad.evaluation.main import main
from dyad.evaluation.suite import build_evaluators
from dyad.train.towers.build import build_model

OURS = {"nDCG@10": "nDCG@10", "Recall@100": "R@100", "MRR@10": "RR@10", "MAP@100": "AP@100", "Success@5": "Success@5"}
WITHOUT = ["examples=0", "baselines=[]"]


def run_eval(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["eval", *arguments])
    main()


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def means(qrels: Path, run: Path) -> dict[str, float]:
    """By ir_measures, from files."""
    parsed = {ir_measures.parse_measure(theirs): ours for ours, theirs in OURS.items()}
    judged = [ir_measures.Qrel(q, p, g) for q, of in read_qrels(qrels).items() for p, g in of.items()]
    found = ir_measures.calc_aggregate(list(parsed), judged, list(ir_measures.read_trec_run(str(run))))
    return {parsed[measure]: value for measure, value in found.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("passages"))


@pytest.fixture(scope="module")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_beir(tmp_path_factory.mktemp("beir") / "tiny")


@pytest.fixture(scope="module")
def out(run: Path, beir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command with all it has: two splits of one folder, all baselines."""
    folder = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_eval(monkeypatch, f"checkpoint={run}", f"suite=[beir:{beir},beir:{beir}@dev]", f"out={folder}")
    return folder


def test_metrics_are_those_of_the_run_that_was_written(out: Path, beir: Path) -> None:
    for name, split in (("tiny", "test"), ("tiny_dev", "dev")):
        result = read(out / f"{name}.json")
        expected = means(beir / "qrels" / f"{split}.tsv", out / f"{name}.trec")
        assert {metric: result["metrics"][metric] for metric in OURS} == pytest.approx(expected, abs=1e-12)
        assert means(out / f"{name}.qrels", out / f"{name}.trec") == expected
        assert (result["task"], result["step"], result["dataset"]) == ("passage_retrieval", 7, name)
        assert 0 < expected["nDCG@10"] < 1
        written = read(out / f"{name}.beir.json")
        assert written["ndcg"]["NDCG@10"] == round(expected["nDCG@10"], 5)
        assert written["recall"].keys() == {f"Recall@{k}" for k in (1, 3, 5, 10, 100)}


def test_a_corpus_smaller_than_k_is_found_whole_and_once(out: Path, beir: Path) -> None:
    found = read_run(out / "tiny.trec")
    ids = {json.loads(line)["_id"] for line in (beir / "corpus.jsonl").read_text().splitlines()}
    assert len(ids) == 30 and len(found) == 11
    for question, passages in found.items():
        assert set(passages) == ids - ({"d3"} if question == "d3" else set())


def test_the_question_itself_is_no_answer_unless_it_is_judged(run: Path, tmp_path: Path, monkeypatch) -> None:
    folder = write_beir(tmp_path / "own")
    with (folder / "qrels" / "test.tsv").open("a") as file:
        file.write("d3\td3\t1\n")
    run_eval(monkeypatch, f"checkpoint={run}", f"suite=[beir:{folder}]", f"out={tmp_path}", *WITHOUT)
    assert len(read_run(tmp_path / "own.trec")["d3"]) == 30


def test_a_question_whose_right_passage_is_not_in_the_corpus_counts_as_zero(run: Path, tmp_path: Path) -> None:
    folder = write_beir(tmp_path / "two")
    (folder / "qrels/gone.tsv").write_text("query-id\tcorpus-id\tscore\nq1\tgone\t1\nq2\tp2\t1\n")
    found = dyad.evaluate(dyad.load(str(run)), f"beir:{folder}@gone")["two_gone"]
    assert found["num_questions"] == 2 and found["Success@100"] == 0.5


def test_intervals_are_over_topics(out: Path, beir: Path) -> None:
    result = read(out / "tiny.json")
    queries = [json.loads(line) for line in (beir / "queries.jsonl").read_text().splitlines()]
    topic = {query["_id"]: query["metadata"]["topic"] for query in queries}
    found = measures(read_qrels(beir / "qrels" / "test.tsv"), read_run(out / "tiny.trec"), ["MRR@10"])["MRR@10"]
    topic["q11"] = "not asked"
    groups = [topic[query] for query in found]
    assert len(groups) == 12 and result["metrics"]["num_questions"] == 12
    assert result["intervals"]["MRR@10"] == interval(list(found.values()), groups)


def test_baselines_are_what_they_say(out: Path, run: Path, beir: Path) -> None:
    """BM25 by its own index, fusion by hand, the untrained encoder by a full sort of its scores."""
    result, corpus = read(out / "tiny.json"), open_corpus(str(beir), "test")
    passages = [corpus[i] for i in range(len(corpus))]
    qrels = read_qrels(beir / "qrels" / "test.tsv")
    asked = [json.loads(line) for line in (beir / "queries.jsonl").read_text().splitlines()]
    queries = {q["_id"]: q["text"] for q in asked}
    config = read_config(run, copies=False)
    bm25 = build_bm25(f"{passage.title} {passage.text}" for passage in passages)
    words: Run = {}
    for query, (scores, positions) in zip(queries, bm25.search(list(queries.values()), 100), strict=True):
        ids = [str(corpus[position].id) for position in positions.tolist()]
        words[query] = {p: s for p, s in zip(ids, scores.tolist(), strict=True) if (query, p) != ("d3", "d3")}
    assert words["q5"] == {}
    torch.manual_seed(config.seed)
    model = build_model(config)
    towers, dense = model.towers.eval(), {}
    with torch.no_grad():
        y = towers.y_tower(model.tokenize([f"{p.title} {p.text}" for p in passages], 128))
        x = towers.x_tower(model.tokenize(list(queries.values()), 32))
        cosine = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(y).T
    for query, row in zip(queries, cosine.tolist(), strict=True):
        dense[query] = {str(p.id): s for p, s in zip(passages, row, strict=True) if (query, p.id) != ("d3", "d3")}
    own = read_run(out / "tiny.trec")
    places = [{q: {p: r for r, (p, _) in enumerate(ranked(of), 1)} for q, of in s.items()} for s in (own, words)]
    fused = {q: {p: sum(1 / (60 + of[q][p]) for of in places if p in of[q]) for p in own[q]} for q in own}
    names = ["nDCG@10", "MRR@10", "Recall@100", "Success@1"]
    model_values = measures(qrels, own, names)
    for name, system in (("bm25", words), ("untrained", dense), ("fusion", fused)):
        values, baseline = measures(qrels, system, names), result["baselines"][name]
        for metric in names:
            assert baseline["metrics"][metric] == pytest.approx(np.mean(list(values[metric].values())), abs=1e-6)
            difference = result["metrics"][metric] - baseline["metrics"][metric]
            assert baseline["difference"][metric]["value"] == pytest.approx(difference)
    topic = {q["_id"]: q["metadata"]["topic"] for q in asked} | {"q11": "not asked"}
    paired = [model_values["nDCG@10"][q] - v for q, v in measures(qrels, words, ["nDCG@10"])["nDCG@10"].items()]
    expected = interval(paired, [topic[q] for q in model_values["nDCG@10"]])
    assert result["baselines"]["bm25"]["difference"]["nDCG@10"]["interval"] == pytest.approx(expected)
    assert result["baselines"]["untrained"]["metrics"] != result["metrics"]


def test_the_table_has_a_row_for_each_system_and_fits_80_columns(run: Path, beir: Path, monkeypatch, capsys) -> None:
    run_eval(monkeypatch, f"checkpoint={run}", f"suite=[beir:{beir}]", "examples=2", "baselines=[bm25,fusion]")
    shown = capsys.readouterr().out
    table = shown[: shown.index("step 7 of")].splitlines()
    assert max(map(len, (line.rstrip() for line in table))) <= 80
    rows = [line.split()[0] for line in table if line[:2].strip() and "─" not in line]
    assert rows == ["tiny:", "system", "model", "bm25", "fusion", "chance"]
    result = read(run / "eval" / "tiny.json")
    assert f"{result['metrics']['nDCG@10']:.3f}" in shown and list(result["baselines"]) == ["bm25", "fusion"]
    kinds = [case["kind"] for case in result["gallery"]["question → passages"]]
    assert kinds == 2 * ["best"] + 2 * ["worst"] + 2 * ["random"]


def test_cases_stand_beside_those_of_the_other_systems(out: Path, beir: Path) -> None:
    result, qrels, found = read(out / "tiny.json"), read_qrels(beir / "qrels" / "test.tsv"), read_run(out / "tiny.trec")
    cases = result["gallery"]["question → passages"]
    values = measures(qrels, found, ["nDCG@10"])["nDCG@10"]
    assert [case["kind"] for case in cases] == 4 * ["best"] + 4 * ["worst"] + 3 * ["random"]  # all 11 that are asked
    assert {case["query"]["id"] for case in cases} == found.keys()
    asked = [json.loads(line) for line in (beir / "queries.jsonl").read_text().splitlines()]
    topics: dict[str, list[float]] = {}  # each of the four has one best case
    for query in asked[:-1]:
        topics.setdefault(query["metadata"]["topic"], []).append(values[query["_id"]])
    assert [case["value"]["nDCG@10"] for case in cases[:4]] == sorted(map(max, topics.values()), reverse=True)
    for case in cases:
        query = case["query"]["id"]
        assert case["value"]["nDCG@10"] == pytest.approx(values[query])
        assert list(case["systems"]) == ["model", "bm25", "untrained"]
        own = [p for p, _ in ranked(found[query], 5)]
        assert [answer["id"] for answer in case["systems"]["model"]] == own
        for answer in (a for of in case["systems"].values() for a in of):
            assert answer["right"] == (qrels[query].get(answer["id"], 0) > 0)
            assert answer["title"] and answer["text"] and "spans" not in answer
        grades = [qrels[query][item["id"]] for item in case["right"]]
        assert grades == sorted((g for g in qrels[query].values() if g > 0), reverse=True)[:3]
    assert next(case for case in cases if case["query"]["id"] == "q5")["systems"]["bm25"] == []
    scores = result["scores"]
    assert sum(scores["right"]) == sum(g > 0 for q in found for g in qrels[q].values()) and sum(scores["wrong"]) > 30
    assert sum(scores["best_wrong"]) == 11


def test_evaluations_in_between_show_no_cases(run: Path, beir: Path) -> None:
    trained = load_run(run, run / "checkpoints" / "step_00000007")
    config = trained.config
    config.eval.suite = [f"beir:{beir}@dev"]
    (evaluator,) = build_evaluators(config, trained.model)
    between = evaluator.report(Encoder.of(config, trained.model, LOCAL))
    check_ranking(evaluator, between)
    assert {"intervals", "baselines"} <= between.details.keys() and not {"scores", "gallery"} & between.details.keys()


def test_val_of_a_run_is_a_folder_and_its_split(run: Path, beir: Path, out: Path, monkeypatch, tmp_path: Path) -> None:
    run_eval(monkeypatch, f"checkpoint={run}", f"val={beir}@dev", f"out={tmp_path}", *WITHOUT)
    val, dev = read(tmp_path / "val.json"), read(out / "tiny_dev.json")
    assert val["metrics"] == dev["metrics"] and val["baselines"] == {}


def test_an_approximate_index_says_what_it_misses(
    run: Path, beir: Path, out: Path, monkeypatch, tmp_path: Path
) -> None:
    common = [f"checkpoint={run}", f"suite=[beir:{beir}]", *WITHOUT]
    run_eval(monkeypatch, *common, f"out={tmp_path}/few", "index=IVF5,Flat;nprobe=1")
    run_eval(monkeypatch, *common, f"out={tmp_path}/all", "index=IVF5,Flat;nprobe=5")
    few, whole, flat = read(tmp_path / "few/tiny.json"), read(tmp_path / "all/tiny.json"), read(out / "tiny.json")
    assert "recall_against_exact@30" not in flat["metrics"] and flat["search"] == {"index": "Flat", "depth": 100}
    assert 0 < few["metrics"]["recall_against_exact@30"] < 1 == whole["metrics"].pop("recall_against_exact@30")
    assert whole["metrics"] == pytest.approx(flat["metrics"])
    found = read_run(tmp_path / "few/tiny.trec")
    assert 1 <= min(map(len, found.values())) < 29 and all(
        np.isfinite(list(of.values())).all() for of in found.values()
    )


def test_a_thousand_passages_add_a_measure(run: Path, beir: Path, monkeypatch, tmp_path: Path) -> None:
    run_eval(monkeypatch, f"checkpoint={run}", f"suite=[beir:{beir}@dev]", f"out={tmp_path}", "depth=1000", *WITHOUT)
    assert read(tmp_path / "tiny_dev.json")["metrics"]["Recall@1000"] == 1
    assert "Recall@1000" in read(tmp_path / "tiny_dev.beir.json")["recall"]


def test_embeddings_are_kept_and_made_anew_for_other_weights(run: Path, beir: Path, tmp_path: Path) -> None:
    """One folder for two question sets of one corpus; the same again encodes nothing."""
    trained = load_run(run, run / "checkpoints" / "step_00000007")
    config = trained.config
    config.eval.embeddings, config.eval.suite = str(tmp_path / "kept"), [f"beir:{beir}", f"beir:{beir}@dev"]
    encode = Encoder.of(config, trained.model, LOCAL)

    def opened() -> list[Evaluator]:
        return build_evaluators(config, trained.model)

    def calls(evaluators: list[Evaluator]) -> int:
        count: list[int] = []
        hook = encode.towers["y"].register_forward_hook(lambda *_: count.append(1))
        for evaluator in evaluators:
            evaluator.report(encode)
        hook.remove()
        return len(count)

    queries, passages = 2 + 1, 4  # blocks of 8: one encoder has both sides
    first = opened()
    assert calls(first) == queries + passages
    assert calls(first) == calls(opened()) == queries
    assert len(list((tmp_path / "kept").iterdir())) == 1
    with torch.no_grad():
        next(trained.model.towers.parameters()).add_(0.1)
    assert calls(first) == queries + passages
    assert len(list((tmp_path / "kept").iterdir())) == 2

    def shouted(texts: list[str], length: int, pairs: list[str] | None = None) -> torch.Tensor:
        return trained.model.tokenize([f"oh {text}" for text in texts], length, pairs)

    other = build_evaluators(config, replace(trained.model, tokenize=shouted))  # other files of the tokenizer
    assert calls(other) == queries + passages


def test_half_precision_keeps_half_the_bytes(run: Path, beir: Path, out: Path, monkeypatch, tmp_path: Path) -> None:
    common = [f"checkpoint={run}", f"suite=[beir:{beir}]", f"embeddings={tmp_path}/kept", *WITHOUT]
    kept = {}
    for name in ("float32", "float16"):
        run_eval(monkeypatch, *common, f"out={tmp_path}/{name}", f"embedding_type={name}")
        (kept[name],) = (np.load(path, mmap_mode="r") for path in (tmp_path / "kept").glob("*/*.npy"))
    assert {name: array.dtype for name, array in kept.items()} == {n: np.dtype(n) for n in kept}
    np.testing.assert_allclose(kept["float16"], kept["float32"], atol=1e-3)
    half, whole = read(tmp_path / "float16/tiny.json"), read(out / "tiny.json")
    assert half["metrics"] == pytest.approx(whole["metrics"], abs=0.05)


def test_any_number_of_ranks_writes_the_same_files(commands: Commands, run: Path, beir: Path, tmp_path: Path) -> None:
    words = ["eval", f"checkpoint={run}", f"suite=[beir:{beir},beir:{beir}@dev]"]
    ended = [commands.run(*words, f"out={tmp_path}/one"), *commands.world(2, *words, f"out={tmp_path}/two")]
    assert [e.code for e in ended] == [0, 0, 0], ended
    assert "model ahead" in ended[1].out and "model ahead" not in ended[2].out
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {f"{s}{end}" for s in ("tiny", "tiny_dev") for end in (".json", ".trec", ".qrels", ".beir.json")}
    for name in names:
        assert (tmp_path / "one" / name).read_text() == (tmp_path / "two" / name).read_text(), name


class Names(list[str]):
    """A corpus, as far as the chance levels need one."""

    def positions(self, ids: list[str]) -> np.ndarray:
        return np.array([self.index(name) if name in self else -1 for name in ids], np.int64)


def test_chance_is_what_random_orders_score() -> None:
    rng = random.Random(0)
    passages: Any = Names(f"p{i}" for i in range(15))
    qrels = {"a": {"p0": 3, "p1": 1, "p2": 0}, "b": {"p4": 1}, "c": {f"p{i}": 1 + i % 2 for i in range(12)}}
    qrels |= {"d": {"p1": 1, "gone": 2}, "e": {"gone": 1}, "f": {"p2": 0}}  # judged, and not in the corpus
    by_chance = chance(qrels, passages)
    total = dict.fromkeys(by_chance, 0.0)
    for _ in range(1500):
        run = {q: {p: float(r) for r, p in enumerate(rng.sample(passages, 15))} for q in qrels}
        for name, values in measures(qrels, run, by_chance).items():
            total[name] += sum(values.values()) / len(qrels) / 1500
    assert by_chance == pytest.approx(total, abs=0.02)


def test_a_baseline_that_fails_is_left_out_with_a_line(tmp_path: Path, monkeypatch, capsys) -> None:
    """BM25 of a corpus without words, and an encoder whose weights before training are gone."""
    run, beir = make_run(tmp_path / "run"), write_beir(tmp_path / "beir")
    passages = [
        json.loads(line) | {"title": "", "text": "?!"} for line in (beir / "corpus.jsonl").read_text().splitlines()
    ]
    (beir / "corpus.jsonl").write_text("".join(f"{json.dumps(passage)}\n" for passage in passages))
    (tmp_path / "run/bert/model.safetensors").unlink()
    run_eval(monkeypatch, f"checkpoint={run}", f"suite=[beir:{beir}]")
    result, said = read(run / "eval/beir.json"), capsys.readouterr().err
    assert result["baselines"] == {} and 0 <= result["metrics"]["nDCG@10"] <= 1
    assert "left out: the baseline bm25: BM25: there is no word in the 30 passages" in said
    assert "left out: the baseline untrained: " in said and len(said.splitlines()) == 2
