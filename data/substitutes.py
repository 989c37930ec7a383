"""Another sample in the place of one that cannot be used: which one is arithmetic on (seed, epoch, id, attempt).

So all ranks, any number of workers and a run that goes on put the same sample there, without a word between them. It
comes from the same source, with its own id, keys and noise, as if the order had named it. What is replaced is told in
`Batch.bad`. Only a SampleError is answered so. A shard that is gone or was changed, and storage that fails, stop the
run: they may be mended, and a run that had read on would not be the same one.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from data.batch import Bad
from data.errors import DataError, SampleError

T = TypeVar("T")


@dataclass(frozen=True)
class Substitutes:
    """sizes: samples of each source; most: bad samples in a row after which there is no point in trying; 0: none."""

    sizes: Sequence[int]
    seed: int
    most: int

    def id(self, epoch: int, sample_id: int, attempt: int) -> int:
        """The sample that stands in for another one; attempt 1, 2, … while it cannot be used either."""
        starts = [0, *accumulate(self.sizes)]
        source = bisect_right(starts, sample_id) - 1
        digest = hashlib.blake2b(f"{self.seed}/{epoch}/{sample_id}/{attempt}".encode(), digest_size=8).digest()
        return starts[source] + int.from_bytes(digest, "little") % self.sizes[source]

    def first(self, samples: int, check: Callable[[int], None]) -> None:
        """Raise what check(0) raises when the first samples are all bad, as many as may be so in a row."""
        problem: SampleError | None = None
        for sample_id in range(min(samples, max(self.most, 1))):
            try:
                return check(sample_id)
            except SampleError as error:
                problem = problem or error
        if problem:
            raise problem

    def all(
        self,
        positions: Iterable[tuple[int, int]],
        make: Callable[[int, int], T],
        origin: Callable[[int], tuple[str, str]],
    ) -> tuple[list[T], tuple[Bad, ...]]:
        """make(epoch, id) of every position, and whom others stand in for. origin(id): shard and key.

        Raises the SampleError when `most` is 0, DataError after so many bad samples in a row.
        """
        made: list[T] = []
        bad: list[Bad] = []
        for place, (epoch, sample_id) in enumerate(positions):
            found, passed = self._one(place, epoch, sample_id, make, origin)
            made.append(found)
            bad += passed
        return made, tuple(bad)

    def _one(
        self,
        place: int,
        epoch: int,
        first: int,
        make: Callable[[int, int], T],
        origin: Callable[[int], tuple[str, str]],
    ) -> tuple[T, list[Bad]]:
        bad: list[Bad] = []
        tried = first
        while True:
            try:
                return make(epoch, tried), bad
            except SampleError as error:
                if not self.most:
                    raise
                by = self.id(epoch, first, len(bad) + 1)
                bad.append(Bad(place, tried, *origin(tried), str(error), by))
                tried = by
            if len(bad) == self.most:
                raise DataError(f"{self.most} samples in a row cannot be used (data.bad_in_a_row). {cases(bad)}")


def cases(bad: Sequence[Bad]) -> str:
    """The first ones, for a message."""
    return "For example:" + "".join(f"\n  {one.reason}" for one in bad[:3])
