"""Which drawing of a vendor shows which emoji: by code points where its package gives them, else by name."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SIZE = 64  # side of an image in pixels
# squeezed name → how good a name it is, smaller is better
Names = dict[str, tuple[int, float]]

# The Unicode name, where neither label nor alias is what the vendors without code points call the drawing.
FORMER_NAMES = {"1F635": {"dizzy-face"}}
SPOKEN = str.maketrans({"#": "pound", "*": "asterisk"})  # as in "keycap-pound"


@dataclass(frozen=True)
class Concept:
    hexcode: str
    label: str
    tags: tuple[str, ...]
    group: str
    subgroup: str

    @property
    def code_points(self) -> tuple[int, ...]:
        return tuple(int(part, 16) for part in self.hexcode.split("-"))


@dataclass
class IconSet:
    """icons.json and chars.json of an Iconify package."""

    icons: dict[str, dict[str, Any]]
    aliases: dict[str, dict[str, Any]]
    size: dict[str, float]
    chars: dict[str, str]
    names: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = {*self.icons, *self.aliases}

    def drawing(self, name: str) -> str:
        """The icon that `name` stands for; an alias that flips its parent is a drawing of its own."""
        alias = self.aliases.get(name)
        return self.drawing(alias["parent"]) if alias is not None and set(alias) == {"parent"} else name

    def aliases_of(self, drawing: str) -> set[str]:
        """Every name of the drawing, its own included."""
        return {drawing} | {name for name, alias in self.aliases.items() if alias == {"parent": drawing}}

    def svg(self, drawing: str) -> str:
        """A square SVG of the drawing, centred, on white."""
        alias = self.aliases.get(drawing, {})
        icon = {**self.size, **self.icons[alias.get("parent", drawing)], **alias}
        left, top, width, height = (icon.get(key, 0) for key in ("left", "top", "width", "height"))
        flip = f' transform="translate({2 * left + width} 0) scale(-1 1)"' if icon.get("hFlip") else ""
        side = max(width, height)
        x, y = left - (side - width) / 2, top - (side - height) / 2
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{x} {y} {side} {side}" width="{SIZE}" height="{SIZE}">'
            f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="#fff"/><g{flip}>{icon["body"]}</g></svg>'
        )


def match(concepts: Sequence[Concept], sets: dict[str, IconSet]) -> dict[str, dict[Concept, str]]:
    """vendor → concept → drawing."""
    by_code = {vendor: _match_codes(concepts, icons) for vendor, icons in sets.items() if icons.chars}
    names = _names(concepts, [(sets[vendor], drawn) for vendor, drawn in by_code.items()])
    return {
        vendor: {c: icons.drawing(n) for c, n in by_code[vendor].items()} if icons.chars else _match_names(names, icons)
        for vendor, icons in sets.items()
    }


def _match_codes(concepts: Sequence[Concept], icons: IconSet) -> dict[Concept, str]:
    names = {_joined(code): name for code, name in icons.chars.items()}
    return {c: names[_joined(c.hexcode)] for c in concepts if _joined(c.hexcode) in names}


def _joined(hexcode: str) -> str:
    """Code points without the joiner and the variation selector, which vendors write or leave out as they like."""
    return "-".join(part for part in hexcode.lower().split("-") if part not in ("fe0f", "200d"))


def _names(concepts: Sequence[Concept], known: list[tuple[IconSet, dict[Concept, str]]]) -> dict[Concept, Names]:
    """What each concept is called.

    Best is today's name (the label, or what a vendor with code points calls it), then the former names that Iconify
    keeps as aliases; among equals, the one that shares more words with the label.
    """
    names = {}
    for concept in concepts:
        drawn = [(icons, by_code[concept]) for icons, by_code in known if concept in by_code]
        today = {_slug(concept.label), *(name for _, name in drawn)}
        former = set().union(*(icons.aliases_of(icons.drawing(name)) for icons, name in drawn))
        former |= FORMER_NAMES.get(concept.hexcode, set())
        ranked = [
            (name, (rank, -_shared_words(name, concept)))
            for rank, group in enumerate((today, former))
            for name in group
        ]
        names[concept] = {
            _squeezed(name): quality for name, quality in sorted(ranked, key=lambda r: r[1], reverse=True)
        }
    return names


def _match_names(names: dict[Concept, Names], icons: IconSet) -> dict[Concept, str]:
    """The best pairs first; every drawing shows one concept and every concept has one drawing."""
    there = {_squeezed(name): name for name in sorted(icons.names)}
    pairs = sorted(
        (quality, there[name] in icons.aliases, concept.code_points, name, concept)
        for concept, known in names.items()
        for name, quality in known.items()
        if name in there
    )
    drawn: dict[Concept, str] = {}
    taken: set[str] = set()
    for *_, name, concept in pairs:
        drawing = icons.drawing(there[name])
        if concept not in drawn and drawing not in taken:
            drawn[concept] = drawing
            taken.add(drawing)
    return drawn


def _slug(label: str) -> str:
    """'Côte d’Ivoire' → 'cote-divoire', the way icon names are made of labels."""
    plain = unicodedata.normalize("NFKD", label.lower().translate(SPOKEN)).encode("ascii", "ignore").decode()
    return re.sub("[^a-z0-9]+", "-", plain.replace("'", "").replace(".", "")).strip("-")


def _squeezed(name: str) -> str:
    return name.replace("-", "")  # fxemoji writes names without hyphens


def _shared_words(name: str, concept: Concept) -> float:
    words, label = set(name.split("-")), set(_slug(concept.label).split("-"))
    return len(words & label) / len(words | label)
