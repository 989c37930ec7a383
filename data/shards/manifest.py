"""Record which files the training data consist of. A checkpoint stores the record, and a resumed run compares it.

Sample ids number the samples of all files consecutively, in the order of the files. Files added at the end therefore
leave the ids of the earlier samples unchanged; after any other change an id may mean another sample. The record does
not list single files: it summarises each block of consecutive files. A configuration key (such as data.train) has at
most BLOCKS (32) blocks, so that the record takes a few KB for any number of files.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from dyad.data.shards.content_keys import json_digest
from dyad.data.shards.index import ShardIndex

BLOCKS = 32  # the most blocks (summaries of consecutive files) of one configuration key


@dataclass(frozen=True)
class FileEntry:
    """A file of training data in the record of a run; a stream or a folder counts as one file.

    size: in bytes. samples: their count; 0 where it is not known, as for a log or a stream. digest: a hash of
    everything that the samples in the file depend on.
    """

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
    """Return a FileEntry (name, size, sample count and SHA-256) for each shard index, in the same order."""
    return [FileEntry(index.name, index.size, index.samples, index.sha256) for index in indexes]


def summary(manifest: Manifest) -> Summary:
    """Summarise a manifest (configuration key -> training files) to the JSON form that a checkpoint stores.

    It has at most BLOCKS blocks of consecutive files for each key.
    """

    def blocks(files: Sequence[FileEntry]) -> list[dict[str, Any]]:
        size = max(1, -(-len(files) // BLOCKS))
        return [_block(files[start : start + size]) for start in range(0, len(files), size)]

    return {key: blocks(files) for key, files in manifest.items()}


def changes(before: Summary, now: Manifest) -> Changes:
    """Compare the training files of a run with the files that a checkpoint recorded.

    Return, for each configuration key with a difference, either a description of the first changed, moved or missing
    files, or the number of samples in files that were added at the end. before: the checkpoint's record, made by
    `summary`. now: the present files.
    """
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
    """Summarise a block of consecutive training files as a JSON object.

    It has the name of the first file ("" without files), counts of files, samples and bytes, and a SHA-256 (digest)
    over all entries of `files`.
    """
    return {
        "name": files[0].name if files else "",
        "files": len(files),
        "samples": sum(entry.samples for entry in files),
        "bytes": sum(entry.size for entry in files),
        "digest": json_digest([astuple(entry) for entry in files]),
    }


def _described(block: Mapping[str, Any], start: int, old: Mapping[str, Any] | None = None) -> str:
    """Return a text for a message that describes a block, such as "a.tar with 90 samples in 5,000 bytes".

    block: a summary by `_block`. start: number of files before the block. old: an earlier summary of the same files, or
    None. If `block` differs from `old` in the digest only, the text ends in ", of other content". Without files it is
    "nothing".
    """
    if not block["files"]:
        return "nothing"
    last = start + block["files"]
    which = block["name"] if block["files"] == 1 else f"files {start + 1} to {last}, from {block['name']} on,"
    same = old is not None and {**old, "digest": ""} == {**block, "digest": ""}
    return f"{which} with {block['samples']:,} samples in {block['bytes']:,} bytes" + ", of other content" * same
