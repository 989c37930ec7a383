"""The wordnet set: find the definitions of a word among all definitions of WordNet 3.0. Judgements by construction.

Made on request from a Debian package, as a BEIR folder: a large set that installs in seconds, to measure throughput and
graded metrics with.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.recipes.beir import Judgement, residue, write_beir
from data.recipes.packages import DebianPackage, fetch, unpack

WORDNET = DebianPackage("wordnet-base", "1:3.0-37", "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752")
PARTS = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
HYPERNYMS = ("@", "@i")  # is a kind of, is an instance of
OWN, MORE_GENERAL = 2, 1  # grades
EXAMPLES = re.compile(r';\s*".*')  # they contain the word itself
SYNTAX = re.compile(r"\((a|p|ip)\)$")  # how an adjective may stand, written after the word
SPLIT_OF_RESIDUE = {0: "test", 1: "dev"}  # of SHA-1(query id) mod 10; the others train
SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class Synset:
    """One meaning. id: "n00001740", part of speech and offset; words as they are printed, with blanks."""

    id: str
    words: tuple[str, ...]
    hypernyms: tuple[str, ...]
    definition: str


def build_wordnet(out: Path, scratch: Path) -> None:
    """Write the set into `out`; downloads go to `scratch`."""
    archives = fetch([WORDNET], scratch)
    write_wordnet(out, unpack(archives.values(), scratch / "unpacked"))


def write_wordnet(out: Path, root: Path) -> None:
    """Write corpus, queries, judgements and NOTICE.md, given the folder with the package's files."""
    synsets = {synset.id: synset for synset in read_synsets(root / "usr/share/wordnet")}
    words = by_word(synsets.values())
    write_beir(
        out,
        ({"_id": synset.id, "title": "", "text": synset.definition} for synset in synsets.values()),
        ({"_id": name, "text": text} for name, (text, _) in words.items()),
        {split: judgements(words, synsets, split) for split in SPLITS},
    )
    (out / "NOTICE.md").write_text(
        NOTICE.format(package=WORDNET, passages=len(synsets), queries=len(words)), encoding="utf-8"
    )


def read_synsets(folder: Path) -> Iterator[Synset]:
    for name, part in PARTS.items():
        with (folder / f"data.{name}").open(encoding="utf-8") as file:
            yield from (parse_synset(line, part) for line in file if not line.startswith("  "))  # the licence


def parse_synset(line: str, part: str) -> Synset:
    """One line of a data file (wndb(5)): offset, file, type, count, (word, id) …, count, (symbol, offset, part, …) …"""
    fields, _, gloss = line.partition("|")
    offset, _, _, count, *rest = fields.split()
    words, rest = rest[: 2 * int(count, 16) : 2], rest[2 * int(count, 16) :]
    links = rest[1 : 1 + 4 * int(rest[0])]
    return Synset(
        part + offset,
        tuple(SYNTAX.sub("", word).replace("_", " ") for word in words),
        tuple(links[i + 2].replace("s", "a") + links[i + 1] for i in range(0, len(links), 4) if links[i] in HYPERNYMS),
        EXAMPLES.sub("", gloss).strip(" ;\n"),
    )


def by_word(synsets: Iterable[Synset]) -> dict[str, tuple[str, list[str]]]:
    """Query id → the word as first printed, and its synsets. Case does not tell words apart."""
    senses: dict[str, tuple[str, list[str]]] = {}
    for synset in synsets:
        for word in synset.words:
            _, ids = senses.setdefault(word.lower().replace(" ", "_"), (word, []))
            if synset.id not in ids:
                ids.append(synset.id)
    return senses


def judgements(words: dict[str, tuple[str, list[str]]], synsets: dict[str, Synset], split: str) -> Iterator[Judgement]:
    """A word's own meanings, then the next more general meaning of each."""
    for name, (_, own) in words.items():
        if SPLIT_OF_RESIDUE.get(residue(name), "train") == split:
            grades: dict[str, int] = defaultdict(int)
            for synset in own:
                grades[synset] = OWN
            for general in (general for synset in own for general in synsets[synset].hypernyms):
                grades[general] = max(grades[general], MORE_GENERAL)
            yield from ((name, synset, grade) for synset, grade in grades.items())


NOTICE = """\
# WordNet: words and their definitions

Made by `python -m data build wordnet` from the Debian package {package.pin}, SHA-256
`{package.sha256}`: WordNet 3.0, a BEIR folder of {passages:,}
definitions and {queries:,} words.

Passage = definition of a synset, without its examples, which contain the word. Query = a word, without regard to case.
Judgements: grade 2 for each of its meanings, grade 1 for the meaning one step more general (hypernym, noun and verb).
Splits by word: SHA-1 of the query's `_id` mod 10 is 0 for test, 1 for dev, else train. Synonyms share definitions
across splits; some definitions are the same words. The judgements follow the dictionary's structure, not a reader.

WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved.

This software and database is being provided to you, the LICENSEE, by Princeton University under the following license.
By obtaining, using and/or copying this software and database, you agree that you have read, understood, and will comply
with these terms and conditions: Permission to use, copy, modify and distribute this software and database and its
documentation for any purpose and without fee or royalty is hereby granted, provided that you agree to comply with the
following copyright notice and statements, including the disclaimer, and that the same appear on ALL copies of the
software, database and documentation, including modifications that you make for internal use or for distribution.

THIS SOFTWARE AND DATABASE IS PROVIDED "AS IS" AND PRINCETON UNIVERSITY MAKES NO REPRESENTATIONS OR WARRANTIES, EXPRESS
OR IMPLIED. BY WAY OF EXAMPLE, BUT NOT LIMITATION, PRINCETON UNIVERSITY MAKES NO REPRESENTATIONS OR WARRANTIES OF
MERCHANTABILITY OR FITNESS FOR ANY PARTICULAR PURPOSE OR THAT THE USE OF THE LICENSED SOFTWARE, DATABASE OR
DOCUMENTATION WILL NOT INFRINGE ANY THIRD PARTY PATENTS, COPYRIGHTS, TRADEMARKS OR OTHER RIGHTS.

The name of Princeton University or Princeton may not be used in advertising or publicity pertaining to distribution of
the software and/or database. Title to copyright in this software, database and any associated documentation shall at
all times remain with Princeton University and LICENSEE agrees to preserve same.
"""
