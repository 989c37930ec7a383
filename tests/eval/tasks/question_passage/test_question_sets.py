"""Question sets of BEIR and DPR: what is asked, what is right, what is searched; and every wrong one is refused."""

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.messages import raises
from helpers.passages import make_run, write_beir
from helpers.rows import write_lines

from dyad.data.base.errors import ConfigError, DataError, UserError
from dyad.data.config import DataConfig, PassageConfig
from dyad.data.question_passage.corpus import open_corpus
from dyad.data.question_passage.questions import open_questions
from dyad.eval.metrics import matches
from dyad.eval.tasks.question_passage.question_sets import RowPassages, open_beir, open_dpr
from dyad.evaluation.main import main
from dyad.evaluation.suite import check_suite
from dyad.run.checks import check_config
from dyad.train.cli.compose import compose_config
from dyad.train.config import Task, TrainConfig
from dyad.train.eval_config import EvalConfig

PASSAGES = [
    ("1", "The Eiffel Tower is in Paris.", "Tower"),
    ("2", "Berlin has a gate; so has paris , they say", "Gates"),
    ("3", "A garden by the sea", "Paris"),  # titles are not searched
    ("4", "It was built in 1889 for the fair", "Tower"),
]
QUESTIONS = "where is the tower?\t['Paris']\nwhen was it built’s?\t['1889', \"in '89\"]\nwho?\t['nobody at all']\n"


def context(number: int) -> dict[str, Any]:
    name, text, title = PASSAGES[number]
    return {"title": title, "text": text, "passage_id": name}


ROWS = [
    {"question": "where?", "answers": ["Paris"], "positive_ctxs": [context(0)], "hard_negative_ctxs": [context(2)]},
    {
        "question": "when?",
        "answers": ["1889"],
        "positive_ctxs": [context(3)],
        "negative_ctxs": [context(1), context(0)],
    },
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("dpr"))


def write_folder(folder: Path) -> Path:
    folder.mkdir()
    lines = "".join(f'{name}\t"{text}"\t{title}\n' for name, text, title in PASSAGES)
    (folder / "psgs_w4.tsv").write_text(f"id\ttext\ttitle\n{lines}")
    (folder / "test.csv").write_text(QUESTIONS)
    return folder


def evaluate(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["eval", *arguments])
    main()


def test_answers_are_counted_by_hand(run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """All four passages are found, so accuracy follows from where each answer stands in the retriever's output."""
    folder = write_folder(tmp_path / "nq")
    evaluate(monkeypatch, f"checkpoint={run}", f"suite=[dpr:{folder}]", f"out={tmp_path}", "baselines=[bm25]")
    assert "accuracy@20" in capsys.readouterr().out
    result, retrieved = (json.loads((tmp_path / f"nq{end}").read_text()) for end in (".json", ".dpr.json"))
    having = {"where is the tower?": {"1", "2"}, "when was it built's?": {"4"}, "who?": set()}
    firsts = []
    for row in retrieved:
        assert list(row) == ["question", "answers", "ctxs"] and len(row["ctxs"]) == 4
        assert list(row["ctxs"][0]) == ["id", "title", "text", "score", "has_answer"]
        assert {c["id"] for c in row["ctxs"] if c["has_answer"]} == having[row["question"]]
        scores = [float(c["score"]) for c in row["ctxs"]]
        assert scores == sorted(scores, reverse=True)
        firsts.append(next((i for i, c in enumerate(row["ctxs"]) if c["has_answer"]), 1000))
    assert retrieved[1]["answers"] == ["1889", "in '89"]
    for k in (1, 5, 20, 100):
        assert result["metrics"][f"accuracy@{k}"] == pytest.approx(sum(f < k for f in firsts) / 3)
    assert result["metrics"]["accuracy@5"] == pytest.approx(2 / 3) and "nDCG@10" not in result["metrics"]
    assert result["baselines"]["bm25"]["metrics"]["accuracy@1"] == pytest.approx(2 / 3)
    assert not (tmp_path / "nq.qrels").exists()
    _check_cases(result["gallery"]["question → passages"], retrieved)
    places = sum(row["ctxs"][i]["has_answer"] for row in retrieved for i in range(4))
    assert sum(result["scores"]["right"]) == places == 3 and sum(result["scores"]["best_wrong"]) == 3


def _check_cases(cases: list[dict[str, Any]], retrieved: list[dict[str, Any]]) -> None:
    """Each question once, with what both systems found, and with the answers marked."""
    rows = {row["question"]: row["ctxs"] for row in retrieved}
    answers = {"1": ["Paris"], "2": ["paris"], "4": ["1889"]}
    assert [case["kind"] for case in cases] == ["best", "best", "worst"]
    assert {case["query"]["text"] for case in cases} == rows.keys()
    for case in cases:
        found = rows[case["query"]["text"]]
        first = next((i for i, c in enumerate(found) if c["has_answer"]), None)
        assert case["value"] == {"RR@100": 0.0 if first is None else 1 / (1 + first)}
        assert list(case["systems"]) == ["model", "bm25"]
        assert [a["id"] for a in case["systems"]["model"]] == [c["id"] for c in found]
        for answer in (a for of in case["systems"].values() for a in of):
            marked = [answer["text"][start:end] for start, end in answer.get("spans", [])]
            assert answer["right"] == (answer["id"] in {c["id"] for c in found if c["has_answer"]})
            assert marked == (answers[answer["id"]] if answer["right"] else [])
        assert [r["id"] for r in case["right"]] == [c["id"] for c in found if c["has_answer"]]
    assert cases[2]["query"]["text"] == "who?" and cases[2]["right"] == []


def test_answers_may_be_patterns(run: Path, tmp_path: Path, monkeypatch) -> None:
    folder = write_folder(tmp_path / "trec")
    (folder / "test.csv").write_text("when?\t['1[0-9]{3}', '(']\nwhere?\t['^Paris']\n")
    words = [f"checkpoint={run}", f"suite=[dpr:{folder}]", f"out={tmp_path}", "baselines=[]"]
    for answers, expected in {"regex": [{"4"}, set()], "string": [set(), set()]}.items():
        evaluate(monkeypatch, *words, f"answers={answers}")
        retrieved = json.loads((tmp_path / "trec.dpr.json").read_text())
        assert [{c["id"] for c in row["ctxs"] if c["has_answer"]} for row in retrieved] == expected
        metrics = json.loads((tmp_path / "trec.json").read_text())["metrics"]
        assert metrics["accuracy@5"] == (0.5 if answers == "regex" else 0)


def test_rows_say_what_is_right_in_their_own_passages(run: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "dev.json").write_text(json.dumps(ROWS))
    evaluate(
        monkeypatch, f"checkpoint={run}", f"suite=[dpr:{tmp_path}/dev.json]", f"out={tmp_path}/out", "baselines=[]"
    )
    result = json.loads((tmp_path / "out/dev.json").read_text())
    assert (result["metrics"]["num_questions"], result["metrics"]["num_passages"]) == (2, 4)
    assert {"nDCG@10", "accuracy@20"} <= set(result["metrics"]) and result["metrics"]["Recall@100"] == 1
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        f"dev{end}" for end in (".json", ".trec", ".qrels", ".beir.json", ".dpr.json")
    }


def test_rows_of_one_question_have_all_their_answers(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "question": "who?", "answers": answers} for answers in ([], ["bob"], ["ann", "bob"])]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (question,) = open_dpr(str(tmp_path / "rows.jsonl"), DataConfig()).questions
    assert question.answers == ("bob", "ann")


def test_passages_of_rows_are_a_corpus(tmp_path: Path) -> None:
    others = [{"text": "no id"}, {"text": "another text of an id that is taken", "passage_id": "1"}]
    rows = [*ROWS, {"question": "who?", "answers": [], "positive_ctxs": others}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = open_dpr(str(tmp_path / "rows.jsonl"), DataConfig())
    corpus = pickle.loads(pickle.dumps(data.corpus))
    assert isinstance(corpus, RowPassages) and len(corpus) == 6
    ids = corpus.ids(0, 6)
    assert ids[:4] == ["1", "3", "4", "2"] and len(set(ids)) == 6 and len(ids[4]) == len(ids[5]) == 16
    assert [corpus[i].id for i in range(6)] == ids and corpus[4].text == "no id"
    assert corpus.positions([*ids, "7"]).tolist() == [0, 1, 2, 3, 4, 5, -1]
    assert [corpus[i].key for i in range(6)] == corpus.keys.tolist()
    assert corpus.lengths[4] == 5
    assert [list(of) for of in data.qrels.values()] == [["1"], ["4"], [ids[4], ids[5]]]


def test_other_pools_of_scored_candidates_are_another_corpus(tmp_path: Path) -> None:
    """What is kept of one, embeddings and BM25, must not serve for the other."""
    candidates = [{"text": f"candidate {i}", "score": i} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "which?", "candidates": candidates}) + "\n")
    found = {}
    for best, worst in ((1, 3), (3, 1)):
        config = DataConfig(passage=PassageConfig(pos_pool=best, neg_pool=worst))
        corpus = open_dpr(str(tmp_path / "rows.jsonl"), config).corpus
        found[corpus.fingerprint] = [corpus[i].text for i in range(len(corpus))]
    assert [len(texts) for texts in found.values()] == [4, 4]


def test_right_passages_are_found_in_all_parts_of_a_corpus(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    whole = open_dpr(str(tmp_path / "rows.jsonl"), DataConfig()).qrels
    monkeypatch.setattr(matches, "SCAN", 1)
    assert open_dpr(str(tmp_path / "rows.jsonl"), DataConfig()).qrels == whole and len(whole) == 2


def test_rows_with_a_corpus_are_right_by_content(tmp_path: Path) -> None:
    """Every passage of that title and text, whatever its id; a question whose passage is not there is not judged."""
    rows = [*({**row, "id": "same"} for row in ROWS), {"question": "who?", "positive_ctxs": [{"text": "nowhere"}]}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    twice = [*PASSAGES, ("9", PASSAGES[0][1], PASSAGES[0][2])]
    (tmp_path / "all.jsonl").write_text(
        "".join(f"{json.dumps({'id': f'w{name}', 'text': text, 'title': title})}\n" for name, text, title in twice)
    )
    config = DataConfig()
    config.passage.corpus = str(tmp_path / "all.jsonl")
    data = open_dpr(str(tmp_path / "rows.json"), config)
    assert data.corpus.fingerprint == open_corpus(config.passage.corpus, "x").fingerprint
    assert data.qrels == {"same": {"w1": 1, "w9": 1, "w4": 1}} and len(data.questions) == 2


def test_a_beir_folder_has_its_own_passages_and_splits(tmp_path: Path) -> None:
    folder = write_beir(tmp_path / "tiny")
    (tmp_path / "other.jsonl").write_text('{"id": "1", "text": "a"}\n')
    config = DataConfig()
    config.passage.corpus = str(tmp_path / "other.jsonl")
    test, dev = (open_beir(f"{folder}{split}", config) for split in ("", "@dev"))
    assert (len(test.corpus), len(test.questions), len(dev.questions)) == (30, 11, 3)
    assert test.qrels["q0"]["p7"] == 0 and test.qrels["q11"] == {"p2": 0} and test.questions[0].group == "topic 0"


@pytest.mark.parametrize("table", ["only a question\n", "a\tb\tc\n", " \t['x']\n", "q\tParis\n", "q\t['\xe9\n"])
def test_a_bad_table_is_named_by_line(table: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "bad")
    (folder / "test.csv").write_bytes(QUESTIONS.encode() + table.encode("latin-1"))
    with raises(DataError, "test.csv"):
        open_dpr(str(folder), DataConfig())


def _beir_without(name: str) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (write_beir(folder / "x") / name).rename(folder / "away")
        return f"beir:{folder}/x"

    return make


def _answers_only(folder: Path) -> str:
    (folder / "qas.tsv").write_text(QUESTIONS)
    return f"dpr:{folder}/qas.tsv"


def _right_elsewhere(folder: Path) -> str:
    (write_folder(folder / "x") / "test.csv").write_text("")
    return f"dpr:{folder}/x"


WRONG = {
    "wds:x": lambda folder: "wds:x",
    "no folder": lambda folder: f"beir:{folder}/nowhere",
    "no split": lambda folder: f"beir:{write_beir(folder / 'x')}@tset",
    "a split elsewhere": lambda folder: f"beir:{write_beir(folder / 'x')}@../x",
    "no queries": _beir_without("queries.jsonl"),
    "no file": lambda folder: f"dpr:{folder}/nq.json",
    "no table": lambda folder: f"dpr:{folder}/nq.csv",
    "BEIR": lambda folder: f"dpr:{write_beir(folder / 'x')}",
    "empty folder": lambda folder: f"dpr:{folder}",
}
NAMED = {
    "wds:x": "eval.suite",
    "no folder": "nowhere",
    "no split": "'test'",
    "a split elsewhere": "split=../x",
    "no queries": "queries.jsonl",
    "no file": "nq.json",
    "no table": "nq.csv",
    "BEIR": "beir:",
    "empty folder": "psgs*.tsv",
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_entries_are_refused_before_anything_is_loaded(case: str, tmp_path: Path) -> None:
    with raises(ConfigError, NAMED[case]) as caught:
        check_suite(TrainConfig(Task.question_passage, eval=EvalConfig(suite=[WRONG[case](tmp_path)])))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("make", "named"), [(_answers_only, "qas.tsv"), (_right_elsewhere, "x")])
def test_sets_without_something_to_score_are_refused(make: Callable[[Path], str], named: str, tmp_path: Path) -> None:
    with raises(ConfigError, tmp_path / named):
        open_dpr(make(tmp_path).removeprefix("dpr:"), DataConfig())


def test_training_takes_what_evaluation_takes_as_val(tmp_path: Path) -> None:
    """A split of its own, or a folder of questions and passages: data.train can be neither."""
    beir, dpr = write_beir(tmp_path / "beir"), write_folder(tmp_path / "dpr")
    for val in (f"{beir}@dev", dpr):
        words = ["task=question_passage", "model=minilm", "data=question_passage", f"data.train={beir}"]
        words += ["steps=1", "global_batch_size=2"]
        check_config(compose_config([*words, "data.question.split=dev", f"data.val={val}", f"run.dir={tmp_path}"]))


def test_pairs_with_a_relevance_are_evaluated_as_they_are_trained(tmp_path: Path) -> None:
    """Other rows need no relevance. A score that data.relevance does not name, or that is none, is refused."""
    pair = {"anchor": "q", "positive": "p", "score": 0.5}
    config, scored = DataConfig(relevance="score"), str(write_lines(tmp_path / "a.jsonl", [pair, pair]))
    plain = str(write_lines(tmp_path / "b.jsonl", [*ROWS, {"anchor": "q", "positive": "p"}]))
    assert len(open_dpr(scored, config).questions) == 1 and len(open_dpr(plain, config).questions) == 3
    with raises(DataError, plain, "line 1", "'score'"):  # training reads what evaluation has read before
        open_questions(plain, config)
    for other in (DataConfig(), DataConfig(relevance="similarity")):
        with raises(DataError, scored, "line 1", "score"):
            open_dpr(scored, other)
    with raises(DataError, "c.jsonl", "line 1", "score", 0):
        open_dpr(str(write_lines(tmp_path / "c.jsonl", [{**pair, "score": 0}])), config)
    table = tmp_path / "d.csv"
    table.write_text("anchor,positive,score\nq,p,0.5\n")
    train = ["task=question_passage", "model=minilm", "data=question_passage", f"data.train={table}", "steps=1"]
    check_config(compose_config([*train, "global_batch_size=2", "data.relevance=score", f"data.val={table}"]))


MISTAKES = {
    "suite=[retrieval:x.tar]": "retrieval:x.tar",
    "truth=pairs": "truth=",
    "index=Flatt": "'Flatt'",
    "index=IVF4,Flat;nprobe=many": "nprobe=many",
    "val=nowhere.jsonl": "nowhere.jsonl",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_on_the_command_line(mistake: str, run: Path, tmp_path: Path, monkeypatch) -> None:
    asked = [] if mistake.startswith(("suite", "val")) else [f"suite=[beir:{write_beir(tmp_path / 'x')}]"]
    with raises(UserError, MISTAKES[mistake]) as caught:
        evaluate(monkeypatch, f"checkpoint={run}", *asked, mistake)
    assert caught.value.exit_code == 2
