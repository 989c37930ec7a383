"""The shipped topics are what their notice says; SWORD modules, Nave's lines and words are read as they should be."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections import Counter
from pathlib import Path

import pytest

from data.recipes.beir import residue
from data.recipes.nave import Line, find_names, read_lines, tidy
from data.recipes.sets import SAMPLES, SUMS, verify
from data.recipes.sword import plain, read_bible, read_dictionary
from data.recipes.topics import (
    BIBLE,
    DICTIONARY,
    NAVE,
    SPLITS,
    SWORD,
    WEB,
    Query,
    by_book,
    reason_to_drop,
    resolve,
    without_repeats,
    write_topics,
)

TOPICS = SAMPLES / "topics"


def read_lines_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (TOPICS / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def corpus() -> dict[str, str]:
    return {row["_id"]: row["text"] for row in read_lines_of("corpus.jsonl")}


@pytest.fixture(scope="module")
def queries() -> dict[str, dict]:
    return {row["_id"]: row for row in read_lines_of("queries.jsonl")}


@pytest.fixture(scope="module")
def qrels() -> dict[str, dict[str, list[str]]]:
    """split → query id → passage ids."""
    judged: dict[str, dict[str, list[str]]] = {}
    for split in SPLITS:
        header, *rows = (TOPICS / "qrels" / f"{split}.tsv").read_text().splitlines()
        assert header == "query-id\tcorpus-id\tscore"
        judged[split] = {}
        for query, passage, score in (row.split("\t") for row in rows):
            assert score == "1"
            judged[split].setdefault(query, []).append(passage)
    return judged


# What is shipped


def test_the_shipped_files_have_their_checksums() -> None:
    sums = (TOPICS / SUMS).read_text()
    verify(TOPICS, sums)
    there = {path.relative_to(TOPICS) for path in TOPICS.rglob("*") if path.is_file() and path.name != SUMS}
    expected = {Path(line.split("  ")[1]) for line in sums.splitlines()}
    assert {path for path in there if ".index" not in path.parts} == expected


def test_counts(corpus, queries, qrels) -> None:
    assert len(corpus) == 31_095 and len({verse.split(".")[0] for verse in corpus}) == 66
    assert {split: len(rows) for split, rows in qrels.items()} == {"train": 13_591, "dev": 1_911, "test": 1_555}
    assert {s: sum(map(len, rows.values())) for s, rows in qrels.items()} == {
        "train": 61_768,
        "dev": 8_219,
        "test": 6_315,
    }
    assert sorted(queries) == sorted(query for rows in qrels.values() for query in rows)
    assert len({row["text"] for row in queries.values()}) == len(queries)


def test_every_judgement_names_a_passage_once(corpus, qrels) -> None:
    for rows in qrels.values():
        for passages in rows.values():
            assert len(set(passages)) == len(passages) <= 50 and set(passages) <= corpus.keys()


def test_topics_are_in_one_split_by_their_hash(queries, qrels) -> None:
    for split, rows in qrels.items():
        here = {residue(queries[query]["metadata"]["topic"]) for query in rows}
        assert here == {"test": {0}, "dev": {1}, "train": {2, 3, 4, 5, 6, 7, 8, 9}}[split]


def test_no_dev_or_test_query_repeats_a_train_query(queries, qrels) -> None:
    trained = {frozenset(passages) for passages in qrels["train"].values()}
    for split in ("dev", "test"):
        assert not [q for q, passages in qrels[split].items() if len(passages) >= 4 and frozenset(passages) in trained]


def test_the_notice_says_what_the_files_hold(queries, qrels) -> None:
    notice = (TOPICS / "NOTICE.md").read_text(encoding="utf-8")
    for split, rows in qrels.items():
        topics = len({queries[query]["metadata"]["topic"] for query in rows})
        judgements = sum(map(len, rows.values()))
        assert f"| {split} | {topics:,} | {len(rows):,} | {judgements:,} | 2 |" in notice
    trained = {passage for passages in qrels["train"].values() for passage in passages}
    judged = [passage for passages in qrels["test"].values() for passage in passages]
    assert f"{sum(p in trained for p in judged) / len(judged):.0%} of the test judgements" in notice and "85%" in notice
    assert all(package.pin in notice and package.sha256 in notice for package in (NAVE, WEB))


def test_queries_are_free_of_debris(queries) -> None:
    debris = re.compile(
        r"[“(];|' s\b|[;,]$|\s[,.;:)”]|[“(]\s|[()<>→\[\]]|\s\s|,”$|: :|(?<![IVX] )\b(?![IVX]+\b)[A-Z]{2,}\b"
    )
    assert not [row["text"] for row in queries.values() if debris.search(row["text"])]
    for row in queries.values():
        assert set(row) == {"_id", "text", "metadata"} and re.fullmatch(r"[a-z0-9-]+\.\d+", row["_id"])
    assert queries["reuben.2"]["text"] == "Reuben: Brings mandrakes to his mother"
    assert queries["power.44"]["text"] == "Power: Of God: The thunder of his power"


def test_verses_are_plain_text(corpus) -> None:
    joined = re.compile(r"[a-z][A-Z]|\w[“‘]|\w[.,;:?!]\w|[.,;:?!]”?[A-Za-z]|\s[.,;:?!”’)]|\s\s|[<>&]")
    assert not [verse for verse, text in corpus.items() if joined.search(text) or text != text.strip() or not text]
    assert corpus["Gen.1.1"] == "In the beginning, God created the heavens and the earth."
    assert corpus["Rev.22.21"] == "The grace of the Lord Jesus Christ be with all the saints. Amen."
    assert max(len(text.split()) for text in corpus.values()) == 102
    assert all(row["title"] == "" for row in read_lines_of("corpus.jsonl"))


def test_known_answers(qrels) -> None:
    every = {query: passages for rows in qrels.values() for query, passages in rows.items()}
    assert every["reuben.2"] == ["Gen.30.14"]
    assert every["power.44"] == ["Job.26.14"]


# Reading modules


def write_dictionary(stem: Path, entries: list[tuple[str, str]], per_block: int = 2) -> None:
    """A zLD module, as SWORD writes it."""
    stem.parent.mkdir(parents=True)
    idx, dat, zdx, zdt = b"", b"", b"", b""
    for start in range(0, len(entries), per_block):
        block = entries[start : start + per_block]
        texts = [xml.encode() + b"\0" for _, xml in block]
        offset, table = 4 + 8 * len(texts), struct.pack("<I", len(texts))
        for number, ((key, _), text) in enumerate(zip(block, texts, strict=True)):
            table += struct.pack("<II", offset, len(text))
            offset += len(text)
            record = key.encode() + b"\r\n" + struct.pack("<II", start // per_block, number)
            idx, dat = idx + struct.pack("<II", len(dat), len(record)), dat + record
        packed = zlib.compress(table + b"".join(texts))
        zdx, zdt = zdx + struct.pack("<II", len(zdt), len(packed)), zdt + packed
    for suffix, content in ((".idx", idx), (".dat", dat), (".zdx", zdx), (".zdt", zdt)):
        stem.with_suffix(suffix).write_bytes(content)


def write_bible(root: Path, verses: dict[tuple[str, int, int], str]) -> None:
    """A zText module with the name and the numbering of the real one, one block for each testament."""
    from pysword.books import BibleStructure

    (root / "mods.d").mkdir(parents=True)
    (root / "mods.d" / "web.conf").write_text(
        f"[{BIBLE}]\nDataPath=./modules/web/\nModDrv=zText\nBlockType=BOOK\nCompressType=ZIP\nSourceType=OSIS\n"
        "Encoding=UTF-8\nVersification=NRSVA\nDescription=A Bible\n"
    )
    folder = root / "modules" / "web"
    folder.mkdir(parents=True)
    structure = BibleStructure("nrsva", ["ot", "nt"])
    for testament in ("ot", "nt"):
        block, places = b"", {}
        for (book, chapter, verse), text in verses.items():
            for where, (index,) in structure.ref_to_indicies(book, chapter, verse).items():
                if where == testament:
                    places[index] = (len(block), len(text.encode()))
                    block += text.encode()
        packed = zlib.compress(block)
        rows = (places.get(index, (0, 0)) for index in range(max(places, default=0) + 1))
        (folder / f"{testament}.bzv").write_bytes(b"".join(struct.pack("<IIH", 0, *row) for row in rows))
        (folder / f"{testament}.bzs").write_bytes(struct.pack("<III", 0, len(packed), len(block)))
        (folder / f"{testament}.bzz").write_bytes(packed)


def test_a_dictionary_gives_its_entries_in_order(tmp_path: Path) -> None:
    entries = [("AARON", "<a>1</a>"), ("ÉLAN", "<b>zwei</b>"), ("ZOAR", "<c/>")]
    write_dictionary(tmp_path / "d" / "nave", entries)
    assert list(read_dictionary(tmp_path / "d" / "nave")) == entries


def test_a_bible_gives_every_verse_with_words_except_of_skipped_books(tmp_path: Path) -> None:
    verses = {("Gen", 1, 1): "<w>In</w> it", ("Gen", 1, 3): "<note>only a note</note>", ("Tob", 1, 1): "left out"}
    write_bible(tmp_path, {**verses, ("Rev", 22, 21): 'Amen. <div eID="g" type="book"/> <title>Glossary</title> words'})
    assert read_bible(tmp_path, BIBLE, ["Tob"]) == {"Gen.1.1": "In it", "Rev.22.21": "Amen."}


@pytest.mark.parametrize(
    ("osis", "text"),
    [
        (
            '<w lemma="s:1">God</w><note placement="foot"><reference>1:1 </reference>Elohim.</note><w>made</w>',
            "God made",
        ),
        ("<q>all of it</q><note>x</note>, and", "all of it, and"),
        ("<w>he</w> said.”</q><w>Then</w> <w>son’s</w>", "he said.” Then son’s"),
        ("<speaker>Beloved</speaker><l>Kiss me;<l/>for</l>", "Kiss me; for"),
        ('<title canonical="true">A Psalm.</title><l>Yahweh</l><l>hear &amp; see</l>', "A Psalm. Yahweh hear & see"),
        ("one<lb/>two", "one two"),
        ("<note>one</note> <note>two</note>", ""),
    ],
)
def test_words_of_a_verse_without_markup(osis: str, text: str) -> None:
    assert plain(osis) == text


# Lines and words


NESTED = """<entryFree n="REUBEN"><def>
<lb/>→ Son of Jacob <ref osisRef="Gen.29.32">Ge 29:32</ref>; with 3:4
<lb/>2. A TRIBE
<list><item>Census of <ref osisRef="Num.1.20-Num.1.21">Nu 1:20</ref>,<ref osisRef="Num.2.10">10</ref></item>
<item>See <ref target="Nave:ISRAEL">ISRAEL</ref></item></list>
</def></entryFree>"""


def test_lines_know_the_line_above_and_their_references() -> None:
    first, tribe, census, see = read_lines([("REUBEN", NESTED)])
    assert (first.label.strip(), first.references, first.after.strip()) == (
        "→ Son of Jacob",
        ["Gen.29.32"],
        "; with 3:4",
    )
    assert (tribe.label.strip(), tribe.references) == ("2. A TRIBE", [])
    assert (census.parent.strip(), census.references) == ("2. A TRIBE", ["Num.1.20-Num.1.21", "Num.2.10"])
    assert see.label == "See ISRAEL" and not see.references
    assert [line.number for line in (first, tribe, census, see)] == [1, 2, 3, 4]


def test_a_topic_with_two_entries_goes_on_counting() -> None:
    assert [line.number for line in read_lines([("SIN", NESTED), ("SIN", NESTED)])] == list(range(1, 9))


NAMES = find_names(
    ["And so God spoke to Solomon, and the king heard God.", "Behold, the house of a king", "in Spring, in spring"]
)


def test_names_are_words_capitalised_inside_sentences() -> None:
    assert NAMES["god"] and NAMES["solomon"] and not NAMES["king"] and not NAMES["house"]
    assert not NAMES["spring"]  # as often as not
    assert "behold" not in NAMES  # starts its sentence: says nothing


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("→ Brings mandrakes (an aphrodisiac) to\n his mother ", "Brings mandrakes to his mother"),
        ("12. Goliath' s spear ;", "Goliath's spear"),
        ("“;My lords,” ", "“My lords”"),
        ("“ Engines” used", "“Engines” used"),
        ("”Maschil of,” title of", "“Maschil of,” title of"),
        ("UNDER SOLOMON' S RULE", "Under Solomon's rule"),
        ("KING'S HOUSE", "King's house"),
        ("Also called JEHOSHUAH ", "Also called Jehoshuah"),
        ("Herod Agrippa II to GOD", "Herod Agrippa II to God"),
        ("SELF-CONTROL OF GOD", "Self-control of God"),
        ("(A well near Kadesh) -Hagar fled to", "Hagar fled to"),
        ("(R. V., margin)", ""),
        ("R. V., margin) ", ""),
        ("See also the following", ""),
        ("Also see ", ""),
        ("Seed of Abraham", "Seed of Abraham"),
    ],
)
def test_words_are_tidied(raw: str, clean: str) -> None:
    assert tidy(raw, NAMES) == clean


# Choosing queries


BOOKS = by_book(["Gen.1.1", "Gen.1.2", "Gen.2.1", "Gen.10.1", "Exod.1.1"])


@pytest.mark.parametrize(
    ("references", "verses"),
    [
        (["Gen.1.2", "Gen.1.1", "Gen.1.2"], ["Gen.1.2", "Gen.1.1"]),
        (["Gen.1.2-Gen.10.1"], ["Gen.1.2", "Gen.2.1", "Gen.10.1"]),  # by number: 10 is after 2
        (["Gen.1.3", "Mark.1.1", "Gen.10.1-Exod.1.1", "Gen.1", "Gen"], []),
    ],
)
def test_references_become_verses_that_exist(references: list[str], verses: list[str]) -> None:
    assert resolve(references, BOOKS) == verses


@pytest.mark.parametrize(
    ("label", "references", "after", "verses", "reason"),
    [
        ("Son of Jacob", ["Gen.1.1"], "; with 3:4", 1, "a reference that the conversion broke"),
        ("Son of 2Ch 34", ["Gen.1.1"], "", 1, "a reference that the conversion broke"),
        ("40 days", ["Gen.1.1"], "", 1, None),
        ("Jacob", ["Gen.1.1"], "", 1, "fewer than two words"),
        ("Son of Jacob", ["Gen.1.1", "Gen.2"], "", 1, "cites a whole chapter or book"),
        ("Son of Jacob", ["Gen.1.1-Gen.2"], "", 1, "cites a whole chapter or book"),
        ("Son of Jacob", ["Gen.1.1"], "", 51, "more than 50 verses"),
        ("Son of Jacob", ["Gen.1.1"], "", 50, None),
        ("Unclassified scriptures relating to", ["Gen.1.1"], "", 1, "“General” or “Unclassified scriptures”"),
        ("Son of Jacob", ["Gen.1.3"], "", 0, "none of its verses exists"),
    ],
)
def test_lines_that_make_no_query(label, references, after, verses, reason) -> None:
    line = Line("T", 1, "", label, references, after)
    assert reason_to_drop(line, Query("t.1", "T", f"T: {label}", label, tuple(map(str, range(verses))))) == reason


def test_repeats_of_train_lines_leave_dev_and_test() -> None:
    train, test, dev = (next(t for t in map(str, range(100)) if residue(t) == r) for r in (5, 0, 1))

    def query(topic: str, label: str, verses: str) -> Query:
        return Query(f"{topic}.{label}.{verses}", topic, label, label, tuple(verses))

    kept = [query(train, "a b", "xy"), query(train, "c d", "uvwx"), query(test, "a b", "x"), query(dev, "other", "xy")]
    repeats = [query(test, "A b", "yx"), query(dev, "other", "xwvu")]
    assert without_repeats([*kept, *repeats]) == kept


def test_a_set_is_made_of_modules(tmp_path: Path) -> None:
    root, out = tmp_path / "root", tmp_path / "out"
    topics = [("AARON", NESTED), ("LEVI", NESTED.replace("Son of Jacob", "A son of Jacob")), ("LEVI", NESTED)]
    write_dictionary(root / DICTIONARY, topics)
    verses = {("Gen", 29, 32): "Leah conceived.", ("Num", 1, 20): "The children.", ("Num", 2, 10): "South."}
    write_bible(root / SWORD, {**verses, ("Tob", 1, 1): "left out"})
    for folder in (out, tmp_path / "again"):
        folder.mkdir()
        write_topics(folder, root)
    files = [sorted(path for path in f.rglob("*") if path.is_file()) for f in (out, tmp_path / "again")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    rows = [json.loads(line) for line in (out / "queries.jsonl").read_text().splitlines()]
    assert Counter(row["text"] for row in rows) == {"Aaron: A tribe: Census of": 1, "Levi: A tribe: Census of": 1}
    judged = [row for split in SPLITS for row in (out / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]]
    assert sorted(judged) == [
        f"{topic}.3\t{verse}\t1" for topic in ("aaron", "levi") for verse in ("Num.1.20", "Num.2.10")
    ]
    notice = (out / "NOTICE.md").read_text(encoding="utf-8")
    assert (
        "- 3: a reference that the conversion broke" in notice and "- 1: printed twice in its topic (merged)" in notice
    )
