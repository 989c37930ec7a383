"""Questions go from any format into any other with what both can hold, and what one cannot hold is said."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pyarrow.json
import pytest
from helpers.convert import (
    DPR,
    ROWS,
    TARGETS,
    TEXT,
    Converted,
    Read,
    context,
    converted,
    read,
    write_beir,
    write_dpr,
    write_lines,
)
from helpers.messages import raises

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.cli.convert import convert, convert_passages
from dyad.data.cli.options import PackOptions, Target
from dyad.data.cli.writers import RELEVANCE
from dyad.data.config import DataConfig
from dyad.data.question_passage.corpus import open_corpus
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.question_passage.questions import open_questions

HELD = {
    Target.shards: {"ids", "answers", "groups", "titles", "negatives", "lists"},
    Target.dpr: {"ids", "answers", "groups", "titles", "negatives", "lists"},
    Target.tevatron: {"ids", "answers", "titles", "negatives"},
    Target.tevatron_ids: {"ids", "answers", "titles", "negatives"},
    Target.flag: {"negatives"},
    Target.beir: {"ids", "groups", "titles"},
}


def seen_through(target: Target, rows: list[Read]) -> list[Read]:
    """What is left of rows in a format that holds so much."""
    held = HELD[target]

    def question(value: Question) -> Question:
        return replace(
            value,
            id=value.id if "ids" in held else "",
            answers=value.answers if "answers" in held else (),
            group=value.group if "groups" in held else None,
        )

    def passages(values: list[Passage]) -> list[Passage]:
        kept = [replace(p, id=p.id if "ids" in held else None) for p in values]
        return [replace(p, title=p.title if "titles" in held else "") for p in kept]

    def negatives(plain: list[Passage], hard: list[Passage]) -> tuple[list[Passage], list[Passage]]:
        if "negatives" not in held:
            return [], []
        return (passages(plain), passages(hard)) if "lists" in held else ([], passages([*hard, *plain]))

    return [(question(q), passages(right), *negatives(plain, hard)) for q, right, plain, hard in rows]


def without_made_ids(rows: list[Read], real: set[str]) -> list[Read]:
    """Ids that were made, or stand for a row of a file, are not part of what is held."""

    def passages(values: list[Passage]) -> list[Passage]:
        return [p if p.id in real else replace(p, id=None) for p in values]

    return [
        (q if q.id in real else replace(q, id=""), passages(right), passages(plain), passages(hard))
        for q, right, plain, hard in rows
    ]


REAL = {"q0", "q1", *(f"p{n}" for n in range(1, 8))}


@pytest.mark.parametrize("first", TARGETS, ids=lambda target: target.name)
def test_every_format_into_every_other(tmp_path: Path, first: Target) -> None:
    """What is read at the end is what was read at the start, seen through both formats."""
    start = Converted(tmp_path, Target.dpr)
    write_dpr(tmp_path / "train.json", ROWS)
    there = converted(start.source, tmp_path / "there", first)
    rows = read(start)
    assert without_made_ids(read(there), REAL) == seen_through(first, rows)
    for second in TARGETS:
        back = converted(there.source, tmp_path / second.name, second, corpus=there.corpus)
        expected = seen_through(second, seen_through(first, rows))
        assert without_made_ids(read(back), REAL) == expected, (first, second)


def test_content_of_each_format(tmp_path: Path) -> None:
    """Field by field, as the peers name them."""
    source = write_dpr(tmp_path / "x.json", ROWS)
    made = {target: converted(source, tmp_path / target.name, target).folder for target in TARGETS}
    assert json.loads((made[Target.dpr] / "train.json").read_text()) == ROWS
    assert len((made[Target.dpr] / "train.json").read_bytes().split(b"\n")) == 5, "a row on each line"
    first = {
        target: json.loads((folder / "train.jsonl").read_bytes().splitlines()[0])
        for target, folder in made.items()
        if (folder / "train.jsonl").exists()
    }
    texts = {n: f"passage {n} {TEXT}" for n in range(1, 8)}
    documents = [
        {"docid": f"p{n}", "title": {1: "Ann", 4: "Bob"}.get(n, ""), "text": texts[n]} for n in (1, 2, 3, 4, 5, 6, 7)
    ]
    assert first[Target.tevatron] == {
        "query_id": "q1",
        "query": "who wrote it?",
        "answers": ["Ann", "Ann Lee"],
        "positive_passages": documents[:2],
        "negative_passages": [documents[3], documents[4], documents[2]],
    }
    assert first[Target.tevatron_ids] == {
        "query_id": "q1",
        "query_text": "who wrote it?",
        "answers": ["Ann", "Ann Lee"],
        "positive_document_ids": ["p1", "p2"],
        "negative_document_ids": ["p4", "p5", "p3"],
    }
    assert first[Target.flag] == {
        "query": "who wrote it?",
        "pos": [texts[1], texts[2]],
        "neg": [texts[4], texts[5], texts[3]],
    }
    beir = made[Target.beir]
    corpus = [json.loads(line) for line in (beir / "corpus.jsonl").read_bytes().splitlines()]
    assert sorted(corpus, key=lambda d: d["_id"]) == [
        {"_id": d["docid"], "title": d["title"], "text": d["text"]} for d in documents
    ]
    assert [json.loads(line) for line in (beir / "queries.jsonl").read_bytes().splitlines()] == [
        {"_id": "q1", "text": "who wrote it?", "metadata": {"topic": "writers"}},
        {"_id": "q0", "text": "whose turn?", "metadata": {}},
    ]
    with (beir / "qrels" / "train.tsv").open(newline="") as file:
        assert list(csv.reader(file, delimiter="\t")) == [
            ["query-id", "corpus-id", "score"],
            *[["q1", "p1", "1"], ["q1", "p2", "1"], ["q0", "p2", "1"]],
        ]
    for target in (Target.tevatron, Target.tevatron_ids, Target.flag):
        rows = [json.loads(line) for line in (made[target] / "train.jsonl").read_bytes().splitlines()]
        assert all(list(row) == list(rows[0]) for row in rows), "every row has the same fields"


def test_what_is_lost_and_joined_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = {
        "dataset": "nq",
        "answers": ["x"],
        "question": "whose turn?",
        "positive_ctxs": [{**context(8), "score": 3}],
    }
    plain = {
        "question": "new",
        "positive_ctxs": [context(9, named=False)],
        "hard_negative_ctxs": [context(9, named=False)],
    }
    source = write_dpr(tmp_path / "x.json", [*ROWS, {**extra, "query_id": "q0"}, plain])

    def lines(target: Target) -> list[str]:
        converted(source, tmp_path / target.name, target)
        return capsys.readouterr().out.splitlines()[:-2]

    written = "4 questions, 5 positives, 1 negatives, 6 hard negatives"
    unread = "not read: dataset (1), score of passages (1)"
    mark = "1 marks that a negative is a plain one"
    assert lines(Target.dpr) == [f"{written} in {tmp_path}/dpr (dpr), indexed", unread]
    assert lines(Target.shards) == [f"{written} in {tmp_path}/shards (shards), indexed", unread]
    assert lines(Target.tevatron) == [
        f"{written} in {tmp_path}/tevatron (tevatron), indexed",
        f"dropped, since tevatron cannot hold them: 1 question groups, {mark}",
        unread,
    ]
    assert lines(Target.tevatron_ids) == [
        f"{written}, 9 passages in {tmp_path}/tevatron_ids (tevatron_ids), indexed",
        f"dropped, since tevatron_ids cannot hold them: 1 question groups, {mark}",
        unread,
    ]
    assert lines(Target.flag) == [
        f"{written} in {tmp_path}/flag (flag), indexed",
        "dropped, since flag cannot hold them: 3 question ids, 3 answers, 1 question groups, 3 titles,"
        f" 10 passage ids, {mark}",
        unread,
    ]
    assert lines(Target.beir) == [
        f"3 questions, 5 positives, 9 passages in {tmp_path}/beir (beir), indexed",
        "joined, since beir has each once: 1 rows with the question of an earlier one",
        "dropped, since beir cannot hold them: 3 answers, 1 negatives, 6 hard negatives",
        unread,
    ]


def test_made_ids_are_those_of_the_content(tmp_path: Path) -> None:
    """The same passage in two files, and in two rows of one, gets one id; another title is another passage."""
    same = [{"query": q, "pos": ["a"], "neg": ["b", "a "]} for q in ("x", "y")]
    first = converted(write_lines(tmp_path / "f.jsonl", same), tmp_path / "1", Target.tevatron_ids)
    titled = [{"query": "z", "positive_passages": [{"text": "a"}], "negative_passages": [{"text": "a", "title": "t"}]}]
    second = converted(write_lines(tmp_path / "t.jsonl", titled), tmp_path / "2", Target.tevatron_ids)
    ids = [{p.text: p.id for p in open_corpus(str(made.corpus), "x") if not p.title} for made in (first, second)]
    assert len(open_corpus(str(first.corpus), "x")) == 3 and len(open_corpus(str(second.corpus), "x")) == 2
    assert ids[0]["a"] == ids[1]["a"] != ids[0]["b"] and all(len(str(name)) == 16 for name in ids[0].values())


def test_equal_questions_are_one_in_beir(tmp_path: Path) -> None:
    rows = [{"query": q, "pos": [p], "neg": []} for q, p in (("x", "1"), ("y", "2"), ("x", "3"), ("x", "1"))]
    made = converted(write_lines(tmp_path / "f.jsonl", rows), tmp_path / "b", Target.beir)
    found = [(question.text, sorted(p.text for p in right)) for question, right, *_ in read(made)]
    assert found == [("x", ["1", "3"]), ("y", ["2"])]
    assert len((made.folder / "qrels" / "train.tsv").read_text().splitlines()) == 4


def test_fields_without_use_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    candidates = [{"text": f"{n}", "score": n, "rank": 1} for n in range(7)]
    rows = [{"question": "x", "candidates": candidates, "metadata": {"topic": "t", "url": "u"}}, {**DPR, "lang": "en"}]
    options = PackOptions(out=str(tmp_path / "out"), to=Target.flag, pos_pool=2, neg_pool=3)
    convert(str(write_lines(tmp_path / "x.jsonl", rows)), options)
    assert "not read: rank of passages (7), candidates in the middle (2), lang (1), metadata.url (1)" in (
        capsys.readouterr().out.splitlines()
    )
    rows = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert rows[0] == {"query": "x", "pos": ["6", "5"], "neg": ["2", "1", "0"]}
    folder = write_beir(tmp_path / "in", split="train")
    write_lines(folder / "corpus.jsonl", [{"_id": n, "text": n, "url": "u"} for n in "ab"])
    converted(folder, tmp_path / "beir", Target.beir)
    assert "grades above 1 (1)" in (printed := capsys.readouterr().out)
    assert "not read: lang (2), url of passages (2)" in printed


def test_relevance_goes_into_the_formats_that_have_a_field_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_beir(tmp_path / "in", split="train")

    def told(path: Path, name: str) -> list[tuple[str, list[tuple[str, float]]]]:
        opened = open_questions(str(path), DataConfig(relevance=name))
        rows = [opened.row(i) for i in range(len(opened))]
        pairs = [zip((p.text for p in row.positives), row.relevance or (), strict=True) for row in rows]
        return [(row.question.text, sorted(of_row)) for row, of_row in zip(rows, pairs, strict=True)]

    want = told(folder, "score")
    assert {weight for _, of_row in want for _, weight in of_row} == {0.5, 1.0}
    for target in Target:
        made = tmp_path / target.name
        convert(str(folder), PackOptions(out=str(made), to=target, relevance="score"))
        printed = capsys.readouterr().out
        assert "grades above 1" not in printed
        if target in RELEVANCE:
            (file,) = [path for path in made.iterdir() if path.suffix in (".tar", ".json", ".jsonl")]
            assert told(file, RELEVANCE[target]) == want and f'data.relevance="{RELEVANCE[target]}"' in printed
        else:
            assert f"{sum(len(of_row) for _, of_row in want)} relevances" in printed and "data.relevance" not in printed


def test_peers_read_what_is_written(tmp_path: Path) -> None:
    """pyarrow, which `datasets` of Tevatron and FlagEmbedding is made of, sees one table with texts in every column."""
    source = write_dpr(tmp_path / "x.json", [*ROWS, {**DPR, "answers": []}])
    for target in (Target.tevatron, Target.tevatron_ids, Target.flag, Target.beir):
        folder = converted(source, tmp_path / target.name, target).folder
        for path in folder.glob("*.jsonl"):
            table = pyarrow.json.read_json(path)
            assert table.num_rows == (8 if path.name == "corpus.jsonl" else 3), path
            kinds = [str(kind) for name, kind in zip(table.schema.names, table.schema.types, strict=True)]
            assert all("string" in kind for kind in kinds), (path, kinds)


# ---- corpora -------------------------------------------------------------------------------------------------------


def test_a_corpus_comes_along_where_the_format_has_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also passages that no row names: they are what a search must not find."""
    source = write_beir(tmp_path / "in")
    names = {Target.dpr: "corpus.tsv", **dict.fromkeys([*TARGETS[2:4], Target.beir], "corpus.jsonl")}
    for target in TARGETS:
        made = converted(source, tmp_path / target.name, target, split="test")
        printed = capsys.readouterr().out
        assert "1 negatives" in printed and "grades above 1 (1)" in printed and "lang (2)" in printed
        if target in names:
            corpus = open_corpus(str(made.folder / names[target]), "x")
            passages = [corpus[i] for i in range(len(corpus))]
            assert [(p.id, p.title) for p in passages] == [(n, f"T{n}") for n in "abcd"]
            assert ("outer quotes of texts" in printed) == (target is Target.dpr)
            quote = "" if target is Target.dpr else '"'
            assert [p.text for p in passages] == [f'{quote}{n}" {TEXT}' for n in "abcd"]
        else:
            assert "2 passages that no row names" in printed
        assert [[p.text for p in right] for _, right, *_ in read(made)] == [[f'"b" {TEXT}'], [f'"a" {TEXT}']]


def test_a_corpus_beside_rows_with_passages(tmp_path: Path) -> None:
    """As DPR has them: passages of rows that the corpus has are not written twice, others are added."""
    write_lines(
        tmp_path / "c.jsonl",
        [{"id": f"p{n}", "title": t, "text": f"passage {n} {TEXT}"} for n, t in ((1, "Ann"), (99, ""))],
    )
    source = write_dpr(tmp_path / "x.json", ROWS)
    made = converted(source, tmp_path / "b", Target.beir, corpus=str(tmp_path / "c.jsonl"))
    assert [p.id for p in open_corpus(str(made.folder), "x")] == ["p1", "p99", "p2", "p3", "p4", "p5", "p6", "p7"]
    other = {**ROWS[0], "positive_ctxs": [{"title": "", "text": "else", "passage_id": "p99"}]}
    with raises(DataError, "row 1", "'p99'"):
        converted(
            write_dpr(tmp_path / "y.json", [other]), tmp_path / "d", Target.beir, corpus=str(tmp_path / "c.jsonl")
        )


@pytest.mark.parametrize("target", [Target.dpr, Target.tevatron, Target.tevatron_ids, Target.beir])
def test_passages_alone(tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "psgs.tsv").write_text('id\ttext\ttitle\n1\t"""Aaron"" is\ta man"\tAaron\n2\tsecond\t\n')
    convert_passages(str(tmp_path / "psgs.tsv"), PackOptions(out=str(tmp_path / "out"), to=target))
    assert capsys.readouterr().out.startswith(f"2 passages in {tmp_path}/out ({target.name}), indexed\n")
    (file,) = (path for path in (tmp_path / "out").iterdir() if path.is_file())
    assert file.name == ("corpus.tsv" if target is Target.dpr else "corpus.jsonl")
    corpus = open_corpus(str(file), "x")
    assert [corpus[i] for i in range(len(corpus))] == [
        Passage('Aaron" is\ta man', "Aaron", "1"),
        Passage("second", "", "2"),
    ]


def test_passages_without_ids_get_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a"}, {"text": "b", "title": "t"}, {"text": "a"}])
    convert_passages(str(source), PackOptions(out=str(tmp_path / "out"), to=Target.beir))
    printed = capsys.readouterr().out
    assert "joined, since beir has each once: 1 passages with an equal one before them" in printed
    assert [(p.title, p.text) for p in open_corpus(str(tmp_path / "out"), "x")] == [("", "a"), ("t", "b")]
    with raises(ConfigError, "to=", "tevatron_ids"):
        convert_passages(str(source), PackOptions(out=str(tmp_path / "no"), to=Target.flag))
