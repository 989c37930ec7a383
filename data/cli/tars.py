"""Read images and captions from tar shards for `python -m data pack`, also from shards that training refuses.

Members of one sample that are not side by side are put together. Members with the key and suffix of an earlier member
begin another sample.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from dyad.data.base.errors import BadRow, DataError
from dyad.data.shards.index import OffsetTable, ShardIndex, index_shards
from dyad.data.shards.scan_tar import IMAGES, TEXTS
from dyad.data.shards.shards import Shards
from dyad.data.shards.sources import ShardSource

Members = dict[str, bytes]  # members of a sample: suffix → bytes
MakeSample = Callable[[], Members]  # returns the members of a sample; raises BadRow if training could not use it


def tar_samples(paths: Sequence[str]) -> Iterator[tuple[str, MakeSample]]:
    """Yield (location, function) for each sample of tar shards. The function returns the members of the sample.

    It raises BadRow if the sample cannot be read or has no image, and, if any of the shards has txt, json or cls
    members, if the sample has none of these. What the members hold is not checked. Damaged parts of a shard come before
    its samples, each with a function that raises BadRow. Shards are indexed first.
    """
    indexes = list(index_shards(paths))
    captioned = any(set(TEXTS) & set(index.suffixes) for index in indexes)
    for index in indexes:
        for problem in index.problems:
            if not problem.of_samples:
                yield index.path, partial(_refuse, "damaged part", str(problem))
        shards, table = Shards([ShardSource((index.path,))], [index]), index.table()
        for rows in _rows_of_samples(index, table):
            yield f"{index.path}: sample '{table.key(rows[0])}'", partial(_members, shards, rows, captioned)


def _rows_of_samples(index: ShardIndex, table: OffsetTable) -> list[list[int]]:
    """Return, for each sample, the rows of the index with its members: several if members are not side by side."""
    samples, newest = list[list[int]](), dict[str, tuple[list[int], set[int]]]()  # newest: last sample of each key
    for row in range(index.samples):
        suffixes = {suffix for _, _, suffix in table.member_ranges(row)}
        rows, seen = newest.get(key := table.key(row), ([], set()))
        if not rows or seen & suffixes:
            rows, seen = newest[key] = [], set()
            samples.append(rows)
        rows.append(row)
        seen |= suffixes
    return samples


def _members(shards: Shards, rows: Sequence[int], captioned: bool) -> Members:
    """Return the members of one sample (suffix → bytes), read from `shards`.

    rows: the rows of their index that have members of the sample, at least one. captioned: whether a txt, json or cls
    member is required. Raises BadRow if the sample cannot be read, or lacks the image or this member.
    """
    try:
        members = {suffix: data for row in rows for suffix, data in shards.read(row).items()}
    except DataError as error:
        raise BadRow("damaged sample", str(error)) from None
    for what, suffixes in {"image": IMAGES, **({"caption": TEXTS} if captioned else {})}.items():
        if not set(suffixes) & set(members):
            raise BadRow(f"no {what}", f"its members are {', '.join(members)}")
    return members


def _refuse(reason: str, detail: str) -> Members:
    """Raise BadRow(reason, detail): the function of a sample that cannot be read."""
    raise BadRow(reason, detail)
