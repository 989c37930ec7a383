"""Record which files the training data consist of. A checkpoint stores the record, and a resumed run compares it.

Sample ids count through the files in order. Files added at the end therefore leave all ids unchanged; any other change
may give an id another sample. The record has one summary for each block of consecutive files, and at most BLOCKS blocks
per configuration key, so that it takes a few KB for any number of files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dyad.data.shards.index import ShardIndex

BLOCKS = 32  # summaries of one list, at most


@dataclass(frozen=True)
class FileEntry:
    """A file of training data; a stream or a folder counts as one file. size: in bytes; samples: their count; digest: a
    hash of everything that the samples in the file depend on."""

    name: str
    size: int
    samples: int
    digest: str


Manifest = Mapping[str, Sequence[FileEntry]]  # configuration key → its files in the order of ids
Summary = dict[str, list[dict[str, Any]]]  # JSON


@dataclass(frozen=True)
class Changes:
    """How the files of two manifests differ, by configuration key (such as data.train).

    different: key -> description, for keys whose old files changed, moved or are gone. added: key -> number of new
    samples, for keys with new files after the unchanged old ones.
    """

    different: dict[str, str]
    added: dict[str, int]


def file_entries(indexes: Iterable[ShardIndex]) -> list[FileEntry]:
    """Convert the indexes of shards to FileEntry objects; the digest of each is the SHA-256 of its file."""
    return [FileEntry(index.name, index.size, index.samples, index.sha256) for index in indexes]


def summary(manifest: Manifest) -> Summary:
    """Summarise a manifest (configuration key -> training files): the files of each key in at most BLOCKS blocks, in
    the JSON form that a checkpoint stores."""
    size = {key: max(1, -(-len(files) // BLOCKS)) for key, files in manifest.items()}
    return {
        key: [_block(files[start : start + size[key]]) for start in range(0, len(files), size[key])]
        for key, files in manifest.items()
    }


def changes(before: Summary, now: Manifest) -> Changes:
    """Compare the training files of a run with the files that a checkpoint recorded, and return the differences.
    before: the checkpoint's record, made by `summary`; now: the present files of each configuration key."""
    different: dict[str, str] = {}
    added: dict[str, int] = {}
    for key in sorted({*before, *now}):
        files, start = list(now.get(key, ())), 0
        for old in before.get(key, []):
            block = _block(files[start : start + old["files"]])
            if block != old:
                different[key] = f"{_described(old, start)} there, {_described(block, start, old)} now"
                break
            start += old["files"]
        else:
            if start < len(files):
                added[key] = sum(entry.samples for entry in files[start:])
    return Changes(different, added)


def _block(files: Sequence[FileEntry]) -> dict[str, Any]:
    """Summarise consecutive files of training data: name of the first file, counts of files, samples and bytes, and a
    hash over all entries of `files`."""
    content = json.dumps([astuple(entry) for entry in files])
    return {
        "name": files[0].name if files else "",
        "files": len(files),
        "samples": sum(entry.samples for entry in files),
        "bytes": sum(entry.size for entry in files),
        "digest": hashlib.sha256(content.encode()).hexdigest(),
    }


def _described(block: Mapping[str, Any], start: int, old: Mapping[str, Any] | None = None) -> str:
    """Describe a block of files for a message. start: number of files before the block. old: another block; if only the
    content differs between the two, the text says so."""
    if not block["files"]:
        return "nothing"
    last = start + block["files"]
    which = block["name"] if block["files"] == 1 else f"files {start + 1} to {last}, from {block['name']} on,"
    same = old is not None and {**old, "digest": ""} == {**block, "digest": ""}
    return f"{which} with {block['samples']:,} samples in {block['bytes']:,} bytes" + ", of other content" * same
