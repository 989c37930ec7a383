"""The topics set: the lines of Nave's Topical Bible as questions, the verses they cite as the right passages.

Queries are lines such as "Reuben: Brings mandrakes to his mother", passages the verses of the World English Bible,
judgements an editor's own references. Splits are by topic. Written as a BEIR folder, in the order of the sources.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dyad.data.base.errors import ConfigError
from tests.build_samples.beir import residue, write_beir
from tests.build_samples.nave import Line, find_names, read_lines, tidy
from tests.build_samples.packages import DebianPackage, fetch, unpack
from tests.build_samples.sword import read_bible, read_dictionary

NAVE = DebianPackage("sword-dict-naves", "3.0-1", "244597b26cb8aaad3fffad7081d82174b8a7559c95a1e7722e9f716177ec287f")
WEB = DebianPackage("sword-text-web", "426.0-1", "930b23670b352f0829a306501de4bebb5e654a2df02cde2cbe86b802177868e1")
SWORD = Path("usr/share/sword")
DICTIONARY = SWORD / "modules/lexdict/zld/nave/nave"
BIBLE = "engWEB2015eb"
# Nave does not cite these books: they would be passages without judgements.
DEUTEROCANON = (
    *("Tob", "Jdt", "EsthGr", "Wis", "Sir", "Bar", "PrAzar", "Sus", "Bel", "1Macc", "2Macc", "1Esd", "PrMan"),
    *("AddPs", "3Macc", "2Esd", "4Macc"),
)
SPLITS = ("train", "dev", "test")
SPLIT_OF_RESIDUE = {0: "test", 1: "dev"}  # of SHA-1(topic) mod 10; the others train
MOST_VERSES = 50
SAME_VERSES = 4  # so many verses and no others, in two topics: one line, printed twice
EVERYTHING_ELSE = re.compile(r"(general|unclassified) scriptures", re.IGNORECASE)
UNLINKED = re.compile(r"[A-Za-z] ?\d")  # in a label: a reference that the conversion broke


@dataclass(frozen=True)
class Query:
    id: str
    topic: str
    text: str
    label: str
    verses: tuple[str, ...]

    @property
    def split(self) -> str:
        return split_of(self.topic)


def build_topics(out: Path, scratch: Path) -> None:
    """Write the set into `out`; downloads go to `scratch`."""
    _require_reader()
    archives = fetch((NAVE, WEB), scratch)
    write_topics(out, unpack(archives.values(), scratch / "unpacked"))


def _require_reader() -> None:
    try:
        import pysword  # noqa: F401
    except ImportError:
        raise ConfigError("build: pysword is missing; it reads the Bible. pip install -e '.[build]'") from None


def write_topics(out: Path, root: Path) -> None:
    """Write corpus, queries, judgements and NOTICE.md, given the folder with the files of both packages."""
    verses = read_bible(root / SWORD, BIBLE, DEUTEROCANON)
    queries, dropped = make_queries(read_lines(read_dictionary(root / DICTIONARY)), verses)
    write_beir(
        out,
        ({"_id": verse, "title": "", "text": text} for verse, text in verses.items()),
        ({"_id": q.id, "text": q.text, "metadata": {"topic": q.topic}} for q in queries),
        {split: [(q.id, v, 1) for q in queries if q.split == split for v in q.verses] for split in SPLITS},
    )
    (out / "NOTICE.md").write_text(notice(verses, queries, dropped), encoding="utf-8")


def make_queries(lines: Iterable[Line], verses: dict[str, str]) -> tuple[list[Query], Counter[str]]:
    """The lines that make good queries, and how many others there were, by reason. `verses`: id → text."""
    names, books = find_names(verses.values()), by_book(verses)
    made: dict[
        tuple[str, str], Query
    ] = {}  # by topic and text: a line printed twice in one topic is one query with the verses of both
    dropped: Counter[str] = Counter()
    for line in lines:
        if not line.references:
            continue
        query = _query(line, names, resolve(line.references, books))
        if reason := reason_to_drop(line, query):
            dropped[reason] += 1
        elif twin := made.get((query.topic, query.text)):
            dropped["printed twice in its topic (merged)"] += 1
            verses_of_both = tuple(dict.fromkeys(twin.verses + query.verses))
            made[query.topic, query.text] = replace(twin, verses=verses_of_both)
        else:
            made[query.topic, query.text] = query
    kept = without_repeats(list(made.values()))
    dropped["dev or test line that repeats a train line"] = len(made) - len(kept)
    return kept, dropped


def _query(line: Line, names: dict[str, bool], verses: Sequence[str]) -> Query:
    label = tidy(line.label, names)
    parts = (tidy(line.topic, names), tidy(line.parent, names), label)
    slug = re.sub(r"[^a-z0-9]+", "-", line.topic.lower()).strip("-")
    return Query(f"{slug}.{line.number}", line.topic, ": ".join(filter(None, parts)), label, tuple(verses))


def reason_to_drop(line: Line, query: Query) -> str | None:
    """Why a line is no query, or None."""
    reasons = {
        "fewer than two words": len(query.label.split()) < 2,
        "cites a whole chapter or book": any(end.count(".") < 2 for r in line.references for end in r.split("-")),
        f"more than {MOST_VERSES} verses": len(query.verses) > MOST_VERSES,
        "“General” or “Unclassified scriptures”": EVERYTHING_ELSE.search(query.label),
        "a reference that the conversion broke": re.search(r"\d", line.after) or UNLINKED.search(query.label),
        "none of its verses exists": not query.verses,
    }
    return next((reason for reason, true in reasons.items() if true), None)


Verse = tuple[tuple[int, int], str]  # (chapter, verse), id


def by_book(verses: Iterable[str]) -> dict[str, list[Verse]]:
    """ "Gen" → [((chapter, verse), "Gen.1.1"), …]."""
    books: dict[str, list[Verse]] = {}
    for verse in verses:
        book, chapter, number = verse.split(".")
        books.setdefault(book, []).append(((int(chapter), int(number)), verse))
    return books


def resolve(references: Iterable[str], books: dict[str, list[Verse]]) -> list[str]:
    """The verses that "Gen.30.14" and "Gen.37.21-Gen.37.30" name, as cited, once each, if they exist."""
    found: dict[str, None] = {}
    for reference in references:
        ends = [end.split(".") for end in reference.split("-")]
        if all(len(end) == 3 for end in ends) and ends[0][0] == ends[-1][0]:
            first, last = ((int(end[1]), int(end[2])) for end in (ends[0], ends[-1]))
            book = books.get(ends[0][0], [])
            start, stop = bisect_left(book, first, key=_place), bisect_right(book, last, key=_place)
            found |= {verse: None for _, verse in book[start:stop]}
    return list(found)


def _place(verse: Verse) -> tuple[int, int]:
    return verse[0]


def split_of(topic: str) -> str:
    return SPLIT_OF_RESIDUE.get(residue(topic), "train")


def without_repeats(queries: Sequence[Query]) -> list[Query]:
    """Without the dev and test queries whose verses, all of them and no others, and words a train query has.

    From SAME_VERSES verses on the same verses are enough.
    """
    train = [query for query in queries if query.split == "train"]
    sets = {frozenset(query.verses) for query in train if len(query.verses) >= SAME_VERSES}
    lines = {(frozenset(query.verses), query.label.lower()) for query in train}

    def repeats(query: Query) -> bool:
        verses = frozenset(query.verses)
        return verses in sets or (verses, query.label.lower()) in lines

    return [query for query in queries if query.split == "train" or not repeats(query)]


def notice(verses: dict[str, str], queries: Sequence[Query], dropped: Counter[str]) -> str:
    """NOTICE.md: whose work this is, how it was made, what to know before trusting a figure."""
    rows = "".join(_row(split, [query for query in queries if query.split == split]) for split in SPLITS)
    trained = {verse for query in queries if query.split == "train" for verse in query.verses}
    test = [query for query in queries if query.split == "test"]
    judged = [verse for query in test for verse in query.verses]
    largest = Counter(query.topic for query in test).most_common(5)
    return NOTICE.format(
        nave=NAVE,
        web=WEB,
        rows=rows,
        passages=len(verses),
        repeated=len(verses) - len(set(verses.values())),
        dropped="\n".join(f"- {count:,}: {reason}" for reason, count in dropped.items()),
        seen=sum(verse in trained for verse in judged) / max(1, len(judged)),
        largest=", ".join(topic.capitalize() for topic, _ in largest),
        share=sum(count for _, count in largest) / max(1, len(test)),
    )


def _row(split: str, queries: Sequence[Query]) -> str:
    sizes = [len(query.verses) for query in queries]
    topics = len({query.topic for query in queries})
    middle = sorted(sizes)[len(sizes) // 2] if sizes else 0
    return f"| {split} | {topics:,} | {len(sizes):,} | {sum(sizes):,} | {middle} | {sizes.count(1):,} |\n"


NOTICE = """\
# Topics: questions and passages with an editor's judgements

Made by `python -m tests.build_samples topics` from two Debian packages pinned by SHA-256;
`python -m tests.build_samples topics check=true` builds it again and compares. `SHA256SUMS` in this folder lists every
file (`sha256sum -c SHA256SUMS`). A BEIR folder: `corpus.jsonl`, `queries.jsonl`, `qrels/{{train,dev,test}}.tsv`.

## Whose work this is

- queries, judgements: Nave's Topical Bible by Orville J. Nave (1896), public domain, as the CrossWire Bible Society's
  SWORD module has it, from {nave.pin},
  SHA-256 `{nave.sha256}`.
- passages: World English Bible, public domain, <https://worldenglish.bible>, from {web.pin},
  SHA-256 `{web.sha256}`.
  "World English Bible" is a trademark of eBible.org for the unchanged text.

Nothing here is under copyright; the packages' own files (GPL-2+) are not part of it.

## How it was made

Passage = verse, {passages:,} of them in 66 books; the deuterocanon is left out, which Nave does not cite. Words are
those of the Bible module; footnotes, speakers' names, markup and the glossary after the last verse are left out, and
the space that the module loses after a closing quotation is put back. Titles are empty: the reference is the `_id`
(`Gen.30.14`) and nothing that a question asks for. {repeated} verses repeat another's words.

Query = "Topic: line above: line" for every line that cites verses, relevant = the verses it cites (grade 1). Asides in
brackets, markers and typographic debris are taken out, capitals made those of a sentence. `metadata.topic` is Nave's
headword. Splits by topic: SHA-1(headword) mod 10 is 0 for test, 1 for dev, else train.

| split | topics | queries | judgements | verses per query, median | with one verse only |
|---|---|---|---|---|---|
{rows}
Lines left out, by the first reason that held:

{dropped}

## What to know before trusting a figure

- Topics of dev and test are new, passages are not: {seen:.0%} of the test judgements point at verses that are relevant
  to some train query too.
- Judgements have holes. A verse that answers and was not cited counts as wrong, so every metric is a lower bound; of a
  range each verse counts as relevant, also one that only continues the story. Where the dictionary cites a verse that
  this Bible does not have, the judgement is left out.
- A few topics hold many of the test queries ({largest}: {share:.0%}): draw intervals by topic,
  not by query.
- Nave wrote in the 1890s, for a Christian readership, of texts that speak of slavery, violence and incest. Choose by
  hand what is shown as an example.
"""
