"""Nave's Topical Bible as the SWORD module has it: topics, their lines, the verses each line names, and clean words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from xml.etree import ElementTree

MARKER = re.compile(r"^[\s.→]*(\d+\.)?\s*")
ASIDE = re.compile(r"\([^()]*\)-?")
POINTER = re.compile(r"(also )?see\b", re.IGNORECASE)  # to another topic
HALF_ASIDE = re.compile(r"[()]")
WORD = re.compile(r"[A-Za-z]+([-'][A-Za-z]+)*")
ROMAN = re.compile(r"[IVX]+")
INSIDE = re.compile(r"(?<=[a-z,;] )[A-Za-z]+")  # a word that does not start a sentence
DEBRIS = (  # of the conversion, and of what was taken out
    (re.compile(r"\s+"), " "),
    (re.compile(r"([“(]);? "), r"\1"),
    (re.compile(r"“;"), "“"),
    (re.compile(r"^”"), "“"),
    (re.compile(r"(?<=\w)' (?=s\b)", re.IGNORECASE), "'"),
    (re.compile(r"\s+([,.;:)”])"), r"\1"),
    (re.compile(r"^[ ;,.:&>-]+|[ ;,.:&>-]+$"), ""),
    (re.compile(r"[,;]”(?=$|,)"), "”"),
    (re.compile(r"^\d+[.,] "), ""),
)


@dataclass
class Line:
    """One line of a topic: its own words, the line above it if it is indented, and the references it gives."""

    topic: str
    number: int  # counted from 1 within the topic
    parent: str
    label: str = ""
    references: list[str] = field(default_factory=list)  # "Gen.30.14" or "Gen.37.21-Gen.37.30"
    after: str = ""  # what is printed between and after the references, digits where the module failed to make a link

    def add(self, text: str | None) -> None:
        if self.references:
            self.after += text or ""
        else:
            self.label += text or ""


def read_lines(entries: Iterable[tuple[str, str]]) -> Iterator[Line]:
    """The lines of (topic, XML) pairs, in order. XML: <def>, <lb/> before each line, <list> of indented <item>."""
    numbers: Counter[str] = Counter()
    for topic, xml in entries:
        for line in _lines_of(topic, xml):
            numbers[topic] += 1  # two topics have two entries each
            line.number = numbers[topic]
            yield line


def _lines_of(topic: str, xml: str) -> Iterator[Line]:
    definition = ElementTree.fromstring(xml).find("def")
    line = outer = Line(topic, 0, "")
    for element in definition if definition is not None else ():
        if element.tag == "lb":
            yield from _worded(line)
            line = outer = Line(topic, 0, "")
            line.add(element.tail)
        elif element.tag == "ref":
            _add_reference(line, element)
        elif element.tag == "list":
            yield from _worded(line)
            for item in element:
                line = Line(topic, 0, outer.label)
                line.add(item.text)
                for reference in item:
                    _add_reference(line, reference)
                yield from _worded(line)
            line = outer = Line(topic, 0, outer.label)
    yield from _worded(line)


def _worded(line: Line) -> Iterator[Line]:
    if line.label or line.references:
        yield line


def _add_reference(line: Line, reference: ElementTree.Element) -> None:
    """A verse, or a link to another topic, which counts as words."""
    if target := reference.get("osisRef"):
        line.references.append(target)
    else:
        line.add(reference.text)
    line.add(reference.tail)


def find_names(texts: Iterable[str]) -> dict[str, bool]:
    """Lower-cased word → is it a name, that is, mostly capitalised inside sentences? For every word seen there."""
    balance: Counter[str] = Counter()
    for text in texts:
        for word in INSIDE.findall(text):
            balance[word.lower()] += 1 if word[0].isupper() else -1
    return {word: count > 0 for word, count in balance.items()}


def tidy(text: str, names: dict[str, bool]) -> str:
    """Words as a reader would write them: no markers, asides, debris, shouting; "" for pointers and broken asides."""
    text = ASIDE.sub(" ", MARKER.sub("", text))
    for pattern, replacement in DEBRIS:
        text = pattern.sub(replacement, text)
    return "" if POINTER.match(text) or HALF_ASIDE.search(text) else _as_sentence(text, names)


def _as_sentence(text: str, names: dict[str, bool]) -> str:
    """Words in capitals get those of a sentence. One the Bible lacks, amid ordinary words, is the name of a topic."""
    shouted = text == text.upper()

    def calm(match: re.Match[str]) -> str:
        word, stem = match[0], match[0].partition("'")[0]
        if len(stem) < 2 or stem != stem.upper() or ROMAN.fullmatch(stem):
            return word
        return word.capitalize() if names.get(stem.lower(), not shouted) else word.lower()

    text = WORD.sub(calm, text)
    return text[:1].upper() + text[1:]
