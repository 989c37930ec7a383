"""Which files training data are made of: enough, in a checkpoint, to say later what became of them.

Sample ids count through the files in their order. So files added behind the others leave every id as it was, and any
other change moves ids or changes what they mean. Of many files a checkpoint keeps one summary for each run of some:
a few KB, however many there are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.index import ShardIndex

BLOCKS = 32  # summaries of one list, at most


@dataclass(frozen=True)
class Entry:
    """A file, or what counts as one: `digest` of all that its samples depend on."""

    name: str
    size: int
    samples: int
    digest: str


Manifest = Mapping[str, Sequence[Entry]]  # the key that names them → files in the order of ids
Summary = dict[str, list[dict[str, Any]]]  # JSON


@dataclass(frozen=True)
class Changes:
    """different: for each key whose old files are not all where they were, what is there now, in words; added: the
    keys with files behind the old ones, and how many samples these have."""

    different: dict[str, str]
    added: dict[str, int]


def entries(indexes: Iterable[ShardIndex]) -> list[Entry]:
    return [Entry(index.name, index.size, index.samples, index.sha256) for index in indexes]


def summary(manifest: Manifest) -> Summary:
    return {key: [_block(block) for block in _blocks(files)] for key, files in manifest.items()}


def changes(before: Summary, now: Manifest) -> Changes:
    """What became of the files of a summary."""
    different: dict[str, str] = {}
    added: dict[str, int] = {}
    for key in sorted({*before, *now}):
        files, first = list(now.get(key, ())), 0
        for old in before.get(key, []):
            here = files[first : first + old["files"]]
            if _block(here) != old:
                different[key] = f"{_said(old, first)} there, {_said(_block(here), first, old)} now"
                break
            first += old["files"]
        else:
            if first < len(files):
                added[key] = sum(entry.samples for entry in files[first:])
    return Changes(different, added)


def _blocks(files: Sequence[Entry]) -> list[Sequence[Entry]]:
    size = max(1, -(-len(files) // BLOCKS))
    return [files[start : start + size] for start in range(0, len(files), size)]


def _block(files: Sequence[Entry]) -> dict[str, Any]:
    content = json.dumps([astuple(entry) for entry in files])
    return {
        "name": files[0].name if files else "",
        "files": len(files),
        "samples": sum(entry.samples for entry in files),
        "bytes": sum(entry.size for entry in files),
        "digest": hashlib.sha256(content.encode()).hexdigest(),
    }


def _said(block: Mapping[str, Any], first: int, old: Mapping[str, Any] | None = None) -> str:
    """A block in words; where the `old` one reads the same, that its content differs."""
    if not block["files"]:
        return "nothing"
    last = first + block["files"]
    which = block["name"] if block["files"] == 1 else f"files {first + 1} to {last}, from {block['name']} on,"
    facts = ("name", "files", "samples", "bytes")
    alike = old is not None and all(block[fact] == old[fact] for fact in facts)
    return f"{which} with {block['samples']:,} samples in {block['bytes']:,} bytes" + ", of other content" * alike
