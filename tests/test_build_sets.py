"""The sets made on request, hamexam and wordnet: sources are parsed as documented and become what the notice says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data.errors import DataError
from data.recipes.beir import residue
from data.recipes.hamexam import SPLITS, parse_exam, write_hamexam
from data.recipes.sets import build
from data.recipes.wordnet import Synset, parse_synset, write_wordnet


def exam(name: str, right: str, question: str, *options: str, law: str = "") -> str:
    lines = [f"{name} ({right}){law}", question, *(f"{a}. {option}" for a, option in zip("ABCD", options, strict=True))]
    return "\n".join(lines) + "\n"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for split in SPLITS for row in json.loads((folder / f"{split}.json").read_text())]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def qrels_of(folder: Path, split: str) -> list[tuple[str, str, int]]:
    header, *rows = (folder / "qrels" / f"{split}.tsv").read_text().splitlines()
    assert header == "query-id\tcorpus-id\tscore"
    return [(query, passage, int(grade)) for query, passage, grade in (row.split("\t") for row in rows)]


# hamexam


def test_a_question_has_its_right_and_wrong_options() -> None:
    parsed = parse_exam(exam("T1A01", "C", "Which?", "a", "b", "c", "d", law=" [97.1]"), "file")
    assert (parsed.id, parsed.group, parsed.text) == ("T1A01", "T1A", "Which?")
    assert (parsed.right, parsed.wrong) == (("c",), ("a", "b", "d"))


@pytest.mark.parametrize(
    "every", ["All of these choices are correct", "All these choices are correct", "All of the choices are correct"]
)
def test_an_option_about_the_others_is_no_passage(every: str) -> None:
    right = parse_exam(exam("E1A01", "D", "Which?", "a", "b", "c", every), "file")
    assert (right.right, right.wrong) == (("a", "b", "c"), ())
    wrong = parse_exam(exam("E1A01", "A", "Which?", "a", "b", "c", every), "file")
    assert (wrong.right, wrong.wrong) == (("a",), ("b", "c"))


@pytest.mark.parametrize(
    "text",
    ["", "T1A01\nWhich?\n", "T1A01 (C)\nWhich?\nA. a\nB. b\nC. c\n", "X1A01 (A)\nWhich?\nA. a\nB. b\nC. c\nD. d\n"],
)
def test_a_damaged_question_is_named(text: str) -> None:
    with pytest.raises(DataError, match="pool/T1A01: not an id with its answer"):
        parse_exam(text, "pool/T1A01")


@pytest.fixture
def pools(tmp_path: Path) -> Path:
    """The package's files: a question in each section of the three pools, with options that other questions repeat."""
    folder = tmp_path / "root" / "usr" / "share" / "hamexam"
    for pool in "TGE":
        (folder / pool).mkdir(parents=True)
        for number in range(40):
            name = f"{pool}{number // 10}{'ABCDEFGHIJ'[number % 10]}01"
            text = exam(name, "B", f"Question {name}?", "wrong", f"right {number}", "never", "no")
            (folder / pool / name).write_text(text)
    drawing = exam("E0A02", "A", "What is in Figure E0-1?", "a drawing", "b", "c", "d")
    (folder / "E" / "E0A02").write_text(drawing)
    every = ("one", "two", "three", "All of these choices are correct")
    (folder / "E" / "E0A03").write_text(exam("E0A03", "D", "Which are right?", *every))
    return tmp_path / "root"


def test_options_become_passages_and_hard_negatives(pools: Path, tmp_path: Path) -> None:
    write_hamexam(tmp_path, pools)
    corpus = {row["_id"]: row["text"] for row in lines_of(tmp_path / "corpus.jsonl")}
    rows, queries = rows_of(tmp_path), {row["_id"]: row for row in lines_of(tmp_path / "queries.jsonl")}
    assert len(rows) == len(queries) == 121 and "E0A02" not in queries  # asks about a drawing
    assert sorted(corpus.values()) == sorted(
        {"wrong", "never", "no", "one", "two", "three"} | {f"right {n}" for n in range(40)}
    )
    for row in rows:
        assert list(row) == ["query_id", "question", "answers", "positive_ctxs", "negative_ctxs", "hard_negative_ctxs"]
        assert queries[row["query_id"]]["text"] == row["question"]
        assert row["answers"] == [context["text"] for context in row["positive_ctxs"]]
        for context in row["positive_ctxs"] + row["hard_negative_ctxs"]:
            assert corpus[context["passage_id"]] == context["text"] and context["title"] == ""
    by_id = {row["query_id"]: row for row in rows}
    assert by_id["E0A03"]["answers"] == ["one", "two", "three"] and by_id["E0A03"]["hard_negative_ctxs"] == []
    assert [context["text"] for context in by_id["T0A01"]["hard_negative_ctxs"]] == ["wrong", "never", "no"]


def test_judgements_are_the_right_options_and_sections_stay_together(pools: Path, tmp_path: Path) -> None:
    write_hamexam(tmp_path, pools)
    for split, residues in (("train", {2, 3, 5, 6, 7, 8, 9}), ("dev", {4}), ("test", {0, 1})):
        rows = json.loads((tmp_path / f"{split}.json").read_text())
        judged = {(row["query_id"], context["passage_id"], 1) for row in rows for context in row["positive_ctxs"]}
        assert set(qrels_of(tmp_path, split)) == judged and rows
        assert {residue(row["query_id"][:3]) for row in rows} == residues


# wordnet

DOG_WORDS = "02084071 05 n 03 dog 0 domestic_dog 0 Canis_familiaris 0"
DOG = f"{DOG_WORDS} 003 @ 02083346 n 0000 ~ 01322604 n 0000 @i 00000001 n 0000"
LINES = {
    "noun": [
        f'{DOG} | a member of the genus Canis; "the dog barked all night"  ',
        "02083346 05 n 01 canine 0 000 | a mammal; runs on its toes  ",
        "00000001 05 n 01 Thing 0 000 | what there is  ",
    ],
    "verb": [
        '02001858 38 v 02 chase 0 dog 0 001 @ 02001858 v 0000 02 + 08 00 + 11 00 | go after; "chase the fox" or not  ',
    ],
    "adj": ["00003131 00 s 02 dogged(ip) 0 good(p) 1 001 & 00003132 a 0000 | stubborn  "],
    "adv": ["00001740 02 r 01 a_cappella 0 000 | without accompaniment; ;  "],
}


def test_a_synset_has_words_hypernyms_and_its_definition_without_examples() -> None:
    words, above = ("dog", "domestic dog", "Canis familiaris"), ("n02083346", "n00000001")
    expected = Synset("n02084071", words, above, "a member of the genus Canis")
    assert parse_synset(LINES["noun"][0], "n") == expected
    assert parse_synset(LINES["noun"][1], "n") == Synset("n02083346", ("canine",), (), "a mammal; runs on its toes")
    assert parse_synset(LINES["verb"][0], "v").definition == "go after"
    assert parse_synset(LINES["adj"][0], "a") == Synset("a00003131", ("dogged", "good"), (), "stubborn")
    assert parse_synset(LINES["adv"][0], "r") == Synset("r00001740", ("a cappella",), (), "without accompaniment")


def test_more_words_than_nine_are_counted_in_hexadecimal() -> None:
    words = " ".join(f"w{n} 0" for n in range(16))
    assert len(parse_synset(f"00000002 05 n 10 {words} 000 | sixteen  ", "n").words) == 16


def test_own_meanings_count_two_and_more_general_ones_one(tmp_path: Path) -> None:
    folder = tmp_path / "root" / "usr" / "share" / "wordnet"
    folder.mkdir(parents=True)
    for part, lines in LINES.items():
        (folder / f"data.{part}").write_text("  1 This software and database\n" + "\n".join(lines) + "\n")
    write_wordnet(tmp_path, tmp_path / "root")
    assert len(lines_of(tmp_path / "corpus.jsonl")) == 6
    queries = {row["_id"]: row["text"] for row in lines_of(tmp_path / "queries.jsonl")}
    assert queries["canis_familiaris"] == "Canis familiaris" and queries["dog"] == "dog" and len(queries) == 9
    judged: Counter[tuple[str, str]] = Counter()
    for split, residues in (("train", set(range(2, 10))), ("dev", {1}), ("test", {0})):
        for query, passage, grade in qrels_of(tmp_path, split):
            assert residue(query) in residues
            judged[query, passage] += grade
    own = {"n02084071": 2, "v02001858": 2, "n02083346": 1, "n00000001": 1}  # the verb is its own hypernym: 2, once
    assert {passage: grade for (query, passage), grade in judged.items() if query == "dog"} == own


@pytest.mark.debian
def test_the_real_packages_give_the_counts_that_are_documented(tmp_path: Path) -> None:
    build("hamexam", tmp_path / "hamexam")
    rows = rows_of(tmp_path / "hamexam")
    assert Counter((len(row["positive_ctxs"]), len(row["hard_negative_ctxs"])) for row in rows) == {
        (1, 3): 1395,
        (1, 2): 90,
        (3, 0): 54,
    }
    assert len(lines_of(tmp_path / "hamexam" / "corpus.jsonl")) == 5433
    build("wordnet", tmp_path / "wordnet")
    corpus = lines_of(tmp_path / "wordnet" / "corpus.jsonl")
    assert len(corpus) == 117_659 and all(row["text"] for row in corpus)
    assert len(lines_of(tmp_path / "wordnet" / "queries.jsonl")) == 147_306
    passages = {row["_id"] for row in corpus}
    assert all(passage in passages for split in SPLITS for _, passage, _ in qrels_of(tmp_path / "wordnet", split))
