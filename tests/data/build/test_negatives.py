"""`python -m data negatives`: DPR's rule against a search by hand, what is refused, a build that is stopped."""

from __future__ import annotations

import json
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.data_cli import ended, here
from helpers.messages import raises
from helpers.rows import write_beir, write_lines
from helpers.shards import image, write_tar

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.build import negatives
from dyad.data.cli.options import NegativesOptions
from dyad.data.config import DataConfig, PassageConfig
from dyad.data.question_passage.bm25 import build_bm25
from dyad.data.question_passage.questions import QuestionRows, open_questions

WORDS = ["red", "blue", "green", "stone", "river", "tower", "king", "queen", "bread", "salt"]
DEPTH, MOST = 12, 4


def corpus_rows(count: int = 60) -> list[dict[str, str]]:
    """Passages of five words; ten have the content of earlier ones."""
    draw = random.Random(0)
    rows = [{"_id": f"p{i}", "title": "", "text": " ".join(draw.choices(WORDS, k=5))} for i in range(count)]
    return [*rows, *({**row, "_id": f"copy of {row['_id']}"} for row in rows[:10])]


def questions(count: int = 40) -> list[dict[str, Any]]:
    """Two words each; the last has an answer that no passage has, and no known word."""
    draw = random.Random(1)
    asked = [{"qid": f"q{i}", "question": " ".join(draw.sample(WORDS, 2)), "answers": ["King"]} for i in range(count)]
    return [*asked, {"qid": "none", "question": "zebra", "answers": ["stripes"]}]


def by_hand(question: str, corpus: list[dict[str, str]], answer: str, right: set[str], all_positives: bool) -> Any:
    """Ids of positives and hard negatives, and the rank of the best positive. right: ids that are judged."""
    text_of = {row["_id"]: row["text"] for row in corpus}
    ((_, hits),) = build_bm25(f"{row['title']} {row['text']}" for row in corpus).search([question], DEPTH)
    found, same = [corpus[i]["_id"] for i in hits], {text_of[name] for name in right}
    has_answer = [name for name in found if answer in text_of[name].split()]
    once: dict[str, str] = {}
    for name in has_answer:
        once.setdefault(text_of[name], name)
    positives = [*right] if right else [*once.values()] if all_positives else has_answer[:1]
    wrong: dict[str, str] = {}
    for name in found:
        if name not in has_answer and text_of[name] not in same and text_of[name] != question:
            wrong.setdefault(text_of[name], name)
    ranks = [i for i, name in enumerate(found, 1) if (text_of[name] in same if right else name in has_answer)]
    return positives, [*wrong.values()][:MOST], min(ranks, default=None)


def build(monkeypatch: pytest.MonkeyPatch, source: Path, out: Path, *words: str, most: int = MOST) -> str:
    done = ended(monkeypatch, "negatives", source, f"out={out}", f"depth={DEPTH}", f"negatives={most}", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def opened(path: Path, corpus: Path | None = None) -> QuestionRows:
    return open_questions(str(path), DataConfig(passage=PassageConfig(corpus=None if corpus is None else str(corpus))))


@pytest.mark.parametrize("all_positives", [False, True])
@pytest.mark.parametrize("form", ["inside.jsonl", "inside.json", "ids.jsonl"])
def test_rows_are_those_of_the_rule(
    form: str, all_positives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, corpus = corpus_rows(), write_lines(tmp_path / "corpus.jsonl", corpus_rows())
    asked, passages = write_lines(tmp_path / "q.jsonl", questions()), form.partition(".")[0]
    words = [f"corpus={corpus}", f"passages={passages}", f"all_positives={str(all_positives).lower()}", "workers=1"]
    said = build(monkeypatch, asked, tmp_path / form, *words)
    found = opened(tmp_path / form, corpus if passages == "ids" else None)
    wanted = {q["qid"]: by_hand(q["question"], rows, "king", set(), all_positives) for q in questions()}
    kept = {name: want for name, want in wanted.items() if want[0]}
    assert [found.question(i).id for i in range(len(found))] == [*kept] and 10 < len(kept) < len(wanted)
    for i, (positives, wrong, _) in enumerate(kept.values()):
        row = found.row(i)
        assert [passage.id for passage in row.positives] == positives
        assert [passage.id for passage in row.hard_negatives] == wrong
        assert not len(row.negatives)
    ranks = sorted(rank for _, _, rank in kept.values())
    median = (ranks[(len(ranks) - 1) // 2] + ranks[len(ranks) // 2]) / 2
    dropped = len(wanted) - len(kept)
    share = f"{dropped} dropped ({dropped / len(wanted):.1%})"
    assert f"{len(wanted)} questions: {len(kept)} with a positive, {share}" in said
    assert f"no answer in the best {DEPTH} passages: {dropped}" in said
    assert f"rank of the best positive: median {median:g}; not in the best {DEPTH}: 0.0%" in said
    assert said.count("  ? ") == said.count("  + ") == 3 and "objective=dpr" in said
    assert ("data.passage.corpus=" in said) == (passages == "ids")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == [".index"]


def test_right_passages_that_a_source_names_are_the_positives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of them and passages with an answer are no negatives, and their rank may be beyond those found."""
    rows, corpus = corpus_rows(), write_lines(tmp_path / "corpus.jsonl", corpus_rows())
    search = build_bm25(row["text"] for row in rows)
    judged: list[tuple[str, str, list[str], list[str]]] = []
    for i, answers in enumerate((["king"], [], [], [])):  # most words of a passage with a copy; the last time all
        text = rows[i]["text"] if i == 3 else " ".join(rows[i]["text"].split()[:4])
        ((_, hits),) = search.search([text], DEPTH)
        first, *others = [rows[j]["_id"] for j in hits]
        judged.append((f"q{i}", text, [first, others[3]] if i < 2 else [others[-1], "p59"], answers))
    fields = [
        {"query_id": name, "query_text": text, "answers": answers, "positive_document_ids": right}
        for name, text, right, answers in judged
    ]
    source = write_lines(tmp_path / "judged.jsonl", fields)
    build(monkeypatch, source, tmp_path / "out.jsonl", f"corpus={corpus}", "workers=1")
    found = opened(tmp_path / "out.jsonl")
    for i, (_, text, right, answers) in enumerate(judged):
        _, wrong, _ = by_hand(text, rows, *(answers or ["-"]), right=set(right), all_positives=False)
        row = found.row(i)
        assert [passage.id for passage in row.positives] == right
        assert [passage.id for passage in row.hard_negatives] == wrong and len(wrong) == MOST


def test_judgements_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grade 0 may be a negative; a question without a relevant passage has no row."""
    beir = write_beir(tmp_path / "beir")
    queries = (beir / "queries.jsonl").read_text()
    (beir / "queries.jsonl").write_text(queries.replace("what", "text"))
    said = build(monkeypatch, beir, tmp_path / "out.jsonl", "workers=1", most=DEPTH)
    found = opened(tmp_path / "out.jsonl")
    row = found.row(1)  # its right passages are d4 and d5; d3 was judged 0
    assert len(found) == 6 and row.question.group == "t0" and "6 questions: 6 with a positive, 0 dropped (0.0%)" in said
    assert {passage.id for passage in row.positives} == {"d4", "d5"}
    # the shorter a text, the higher its score; d1 has the text of the question
    assert [passage.id for passage in row.hard_negatives][:5] == ["d0", "d2", "d6", "d8", "d3"]


def test_relevance_stays_with_the_positives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scored pairs and of judgements; the printed command reads it."""
    corpus = write_lines(tmp_path / "corpus.jsonl", corpus_rows())
    rows = [{"query": f"red {i}", "answer": f"stone {i}", "score": share} for i, share in enumerate((0.5, 1))]
    pairs, beir = write_lines(tmp_path / "a.jsonl", rows), write_beir(tmp_path / "beir")
    for source, words, want in (
        (pairs, ("relevance=score", f"corpus={corpus}"), [[0.5], [1.0]]),
        (beir, ("relevance=grade",), [[0.5, 1.0]] * 6),
    ):
        out = tmp_path / f"{source.stem}_built.jsonl"
        said = build(monkeypatch, source, out, "workers=1", *words)
        found = open_questions(str(out), DataConfig(relevance="relevance"))
        assert [found.row(i).relevance for i in range(len(found))] == want and "data.relevance=" in said
    out = f"out={tmp_path}/ids.jsonl"
    here(monkeypatch, "negatives", str(beir), out, "passages=ids", "relevance=grade", "workers=1")
    asked = write_lines(tmp_path / "q.jsonl", questions())
    with raises(ConfigError, "relevance=score", "QUESTIONS", asked):
        here(monkeypatch, "negatives", str(asked), f"out={tmp_path}/x.jsonl", f"corpus={corpus}", "relevance=score")


def test_tables_of_answers_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_lines(tmp_path / "corpus.jsonl", corpus_rows())
    (tmp_path / "q.csv").write_text("red salt\t['k.ng']\nblue\t['k.ng']\n")
    words = f"corpus={corpus}", "match=regex", "workers=1"
    assert "2 questions: 2" in build(monkeypatch, tmp_path / "q.csv", tmp_path / "a.json", *words)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "2 questions: 2" in build(monkeypatch, Path("~/q.csv"), tmp_path / "home.json", *words)
    rows = write_lines(tmp_path / "open.jsonl", [{"question": "red salt", "answer": ["king", "ruler"]}])
    build(monkeypatch, rows, tmp_path / "b.jsonl", f"corpus={corpus}", "answers=answer", "workers=1")
    assert opened(tmp_path / "b.jsonl").row(0).question.answers == ("king", "ruler")


def test_a_stopped_build_goes_on_and_ends_with_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after each kind of byte: of the first line, within a row, at the end of one."""
    corpus = write_lines(tmp_path / "corpus.jsonl", corpus_rows())
    asked = write_lines(tmp_path / "q.jsonl", questions())
    monkeypatch.setattr(negatives, "BLOCK", 8)
    words = [f"corpus={corpus}", f"index={tmp_path}/index", "workers=1"]
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    said = build(monkeypatch, asked, whole, *words).replace("whole.jsonl", "out.jsonl")
    finish = negatives._finish

    def stop(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(negatives, "_finish", stop)
    work = tmp_path / ".out.jsonl.build" / "rows"
    ended(monkeypatch, "negatives", asked, f"out={out}", f"depth={DEPTH}", f"negatives={MOST}", *words)
    written = work.read_bytes()
    monkeypatch.setattr(negatives, "_finish", finish)
    ends = [i + 1 for i, byte in enumerate(written) if byte == ord("\n")]
    for cut, done in ((0, 0), (30, 0), (ends[0], 0), (ends[3] - 9, 2), (ends[3], 3), (len(written), len(ends) - 1)):
        work.parent.mkdir(exist_ok=True)
        work.write_bytes(written[:cut])
        told = build(monkeypatch, asked, out, *words)
        assert out.read_bytes() == whole.read_bytes() and not work.parent.exists()
        assert told.splitlines()[-9:] == said.splitlines()[-9:]
        assert (f"goes on after {done} of {len(questions())} questions" in told) == (done > 0)
        out.unlink()
    work.parent.mkdir()
    work.write_bytes(written[: ends[5]])
    build(monkeypatch, asked, out, *words, "match=regex")  # of other options: it begins anew
    assert out.read_bytes() == whole.read_bytes()


def test_a_build_stopped_without_a_teacher_begins_anew_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows have scores then, or none."""
    corpus = write_lines(tmp_path / "corpus.jsonl", corpus_rows())
    rows = [
        {"query": f"red {i}", "pos": [f"stone {i}"], "neg": [], "pos_scores": [i], "neg_scores": []} for i in range(5)
    ]
    pairs, out = write_lines(tmp_path / "a.jsonl", rows), tmp_path / "out.jsonl"
    words = [f"corpus={corpus}", f"index={tmp_path}/index", "workers=1"]
    build(monkeypatch, pairs, tmp_path / "whole.jsonl", *words, "teacher=scores")
    build(monkeypatch, pairs, out, *words)
    finished = out.read_bytes()
    with monkeypatch.context() as stopped:
        stopped.setattr(negatives, "_finish", lambda *given: sys.exit(1))
        out.unlink()
        ended(stopped, "negatives", pairs, f"out={out}", f"depth={DEPTH}", f"negatives={MOST}", *words)
    assert (tmp_path / ".out.jsonl.build" / "rows").exists()
    build(monkeypatch, pairs, out, *words, "teacher=scores")
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes() != finished


def test_a_builder_of_another_process_makes_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is opened there, once, from the files."""
    corpus = write_lines(tmp_path / "corpus.jsonl", corpus_rows())
    asked = write_lines(tmp_path / "q.jsonl", questions())
    builder = negatives.Builder(str(asked), NegativesOptions(corpus=str(corpus)), tmp_path / "index")
    monkeypatch.setattr(negatives, "_OPEN", {})
    sent = [pickle.loads(pickle.dumps(builder.line)) for _ in range(2)]
    assert sent[0].__self__ is sent[1].__self__ is not builder
    assert [sent[0](i) for i in range(5)] == [builder.line(i) for i in range(5)]


def test_rows_without_any_negative_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"_id": str(n), "text": f"{n} red king"} for n in range(3)])
    asked = write_lines(
        tmp_path / "q.jsonl", [{"question": "red", "answers": [answer]} for answer in ("king", "1 red")]
    )
    warning = "warning: no row has a hard negative"
    assert warning not in build(monkeypatch, asked, tmp_path / "some.jsonl", f"corpus={corpus}", "workers=1")
    asked.write_text(asked.read_text().splitlines()[0] + "\n")
    assert warning in build(monkeypatch, asked, tmp_path / "none.jsonl", f"corpus={corpus}", "workers=1")


def test_what_cannot_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_lines(tmp_path / "corpus.jsonl", corpus_rows())
    asked = write_lines(tmp_path / "q.jsonl", questions())
    (tmp_path / "there.json").write_text("mine")
    out = f"out={tmp_path}/out.jsonl"
    for words, *named in (
        (("out=a.txt",), "out=a.txt", ".jsonl", ".json"),
        ((f"out={tmp_path}/there.json",), "there.json"),
        ((f"out={tmp_path}/a.json", "passages=ids"), "passages=ids", ".jsonl"),
        ((out,), "corpus=FILE"),
        ((out, f"corpus={corpus}", "depth=0"), "depth=0"),
    ):
        with raises(ConfigError, *named):
            here(monkeypatch, "negatives", str(asked), *words)
    assert not (tmp_path / ".out.jsonl.build").exists()
    images = write_tar(tmp_path / "a.tar", [("0.png", image()), ("0.txt", b"x")])
    with raises(ConfigError, "QUESTIONS", images):
        here(monkeypatch, "negatives", str(images), out, f"corpus={corpus}")
    with raises(ConfigError, "QUESTIONS"):
        here(monkeypatch, "negatives", str(asked), str(asked), out)
    none = write_lines(tmp_path / "none.jsonl", [{"question": "red", "answers": ["zebra"]}])
    with raises(DataError, "no answer in the best 100 passages: 1"):
        here(monkeypatch, "negatives", str(none), out, f"corpus={corpus}", "workers=1")
    with raises(ConfigError, f"index={none}"):
        here(monkeypatch, "negatives", str(none), out, f"corpus={corpus}", "workers=1", f"index={none}")
    inside = write_lines(tmp_path / "inside.jsonl", [{"query": "red", "pos": ["red"], "neg": []}])
    with raises(ConfigError, "passages=ids", "passages=inside"):
        here(monkeypatch, "negatives", str(inside), out, f"corpus={corpus}", "workers=1", "passages=ids")
    bad = write_lines(tmp_path / "bad.jsonl", [questions()[0], {"question": "red", "answers": 3}])
    with raises(DataError, bad, 2, "answers"):
        here(monkeypatch, "negatives", str(bad), out, f"corpus={corpus}", "workers=1")
    assert not (tmp_path / "out.jsonl").exists()
    assert json.loads((tmp_path / ".out.jsonl.build" / "rows").read_bytes().split(b"\n")[1].partition(b"\t")[0])
