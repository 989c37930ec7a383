"""README.md and docs/: their fenced blocks, commands, links and keys.

A block of `bash` is run by tests/journeys/test_readme.py; of one of `sh` the commands are composed and nothing is run,
because it needs data or machines that a test has not. A reader sees no difference.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dyad.__main__ import COMMANDS
from dyad.data.cli.main import VERBS
from dyad.train.cli.compose import keys
from dyad.train.cli.presets import groups

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
READ_IN_ORDER = ("README.md", "first_hour.md", "pictures.md", "texts.md", "views_and_classes.md", "own_model.md")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, its language and its text."""

    page: Path
    kind: str
    text: str

    def commands(self) -> list[str]:
        """Its commands, one a line, without comments."""
        lines = re.sub(r"\s*\\\n\s*", " ", self.text).splitlines()
        return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line).strip())]


@cache
def blocks(page: Path) -> list[Block]:
    return [Block(page, kind, text) for _, kind, text in FENCE.findall(page.read_text())]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def run_commands() -> list[str]:
    """The commands of `bash` blocks, each once, in the order in which a reader meets them."""
    first = {name: place for place, name in enumerate(READ_IN_ORDER)}
    pages = sorted(PAGES, key=lambda page: first.get(page.name, len(first)))
    return list(dict.fromkeys(c for page in pages for b in blocks(page) if b.kind == "bash" for c in b.commands()))


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, where GitHub and MkDocs make the same ones."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        if "--" not in slug and slug.isascii():
            found.add(slug)
    return found


def links(page: Path) -> Iterator[tuple[str, str]]:
    """The path and the anchor of each link that leads to a file."""
    for target in re.findall(r"!?\[[^]]*]\(([^)\s]*)\)", prose(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield path, anchor


def spans(page: Path) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def named_keys(span: str) -> set[str]:
    """The keys that a span between backticks names: what stands before `=`, and `section.key`."""
    if re.match(r"python -m|dyad |-|bash |sbatch |pip |docker |[A-Z]", span):
        return set()
    words = [word.strip("'\"[]{},;") for word in span.split()]
    given = {found[1] for word in words if (found := re.match(r"([a-z_]+(?:\.[a-z_]+)*)=", word))}
    sections = {key.partition(".")[0] for key in known_keys() if "." in key}
    named = {word for word in words if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", word)} - {
        "eval.mine",
        "eval.report",
        "eval.compare",
    }
    files = {word for word in named if re.search(r"\.(py|md|sh|json|jsonl|yaml|tsv|txt|sbatch|html|tar|csv)$", word)}
    return given | {word for word in named - files if word.partition(".")[0] in sections}


@cache
def known_keys() -> Collection[str]:
    """Every key of every command: of training with the options of all objectives, and of the others; and sections."""
    of_training = [key for key, _, _ in keys()]
    sections = {key[: dot.start()] for key in of_training for dot in re.finditer(r"\.", key)}
    return {*of_training, *sections, *groups(), *of_commands(), "key", "group"}


def of_commands() -> Iterator[str]:
    """The options of the commands that take key=value but do not train."""
    from dyad.eval.config import CompareCommand, EvalCommand, MineCommand, ReportCommand, ScoreCommand

    schemas: list[Any] = [
        EvalCommand,
        MineCommand,
        ReportCommand,
        CompareCommand,
        ScoreCommand,
        export_options(),
        *(v.options for v in VERBS),
    ]
    for schema in schemas:
        assert is_dataclass(schema)
        yield from (option.name for option in fields(schema))


def export_options() -> type:
    from importlib import import_module

    return import_module(COMMANDS["export"][0]).ExportCommand
