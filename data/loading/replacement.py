"""Replace bad training samples, which are damaged or incomplete, with other samples.

The choice of a replacement is a function of (seed, epoch, sample id, attempt). Therefore all ranks, any number of
workers and a resumed run choose the same replacement without communication. The replacement comes from the same source,
or, with data.rare, from the samples of the same kind: of the rare class, or of the others. It has its own id, content
keys and random augmentation, as if the order of samples had chosen it. `Batch.bad` lists the replaced samples. Only a
SampleError leads to a replacement. A missing or changed shard and failing storage stop the run: they can be repaired,
and a run that went on without them would not be reproducible.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import TypeVar

import numpy as np

from dyad.data.base.errors import DataError, SampleError
from dyad.data.batch import BadSample
from dyad.data.loading.workers import begin_item

T = TypeVar("T")


@dataclass(frozen=True)
class Replacements:
    """Reads the samples of a batch, and replaces a bad sample by another sample of the same source or kind.

    sizes: number of samples of each source; sample ids count consecutively through all sources. seed: determines the
    replacements. limit: the run stops when a sample and its replacements, this many samples in all, are bad
    (DataConfig.bad_in_a_row_limit); 0: no sample is replaced. kinds (n,): the kind of each of n samples, from which a
    replacement is drawn instead, of any source; None: samples have no kinds.
    """

    sizes: Sequence[int]
    seed: int
    limit: int
    kinds: np.ndarray | None = None

    def id(self, epoch: int, sample_id: int, attempt: int) -> int:
        """Return the id of the sample that replaces a bad training sample, of the same source or kind.

        sample_id: id of the bad sample that the order had chosen. attempt: 1 for the first replacement, then 2, 3, … if
        the earlier replacements are bad too. The result may be `sample_id` itself.
        """
        starts = [0, *accumulate(self.sizes)]
        source = bisect_right(starts, sample_id) - 1
        pool = range(starts[source], starts[source + 1])
        if self.kinds is not None:
            pool = np.flatnonzero(self.kinds == self.kinds[sample_id])
        digest = hashlib.blake2b(f"{self.seed}/{epoch}/{sample_id}/{attempt}".encode(), digest_size=8).digest()
        return int(pool[int.from_bytes(digest, "little") % len(pool)])

    def load(
        self,
        positions: Iterable[tuple[int, int]],
        read: Callable[[int, int], T],
        origin: Callable[[int], tuple[str, str]],
    ) -> tuple[list[T], tuple[BadSample, ...]]:
        """Load the samples of a batch: call read(epoch, sample_id) for each pair in `positions`.

        Return the results, in order, and a record of each replaced sample. When `read` raises SampleError, it is called
        for a replacement instead. Raises DataError when a sample and its replacements, `self.limit` samples in all, are
        bad. With a limit of 0 no sample is replaced: the SampleError is raised. Other errors of `read` are raised at
        once. origin(sample_id): returns the shard and the key of a sample, for the record.
        """
        loaded: list[T] = []
        bad: list[BadSample] = []
        for row, (epoch, sample_id) in enumerate(positions):
            tried = sample_id
            for attempt in count(1):
                begin_item(tried)
                try:
                    loaded.append(read(epoch, tried))
                    break
                except SampleError as error:
                    if not self.limit:
                        raise
                    replacement = self.id(epoch, sample_id, attempt)
                    bad.append(BadSample(row, tried, *origin(tried), str(error), replacement))
                    tried = replacement
                if attempt == self.limit:
                    raise too_many_in_a_row(self.limit, bad[-attempt:])
        return loaded, tuple(bad)


def check_any(items: Iterable[T], check: Callable[[T], object]) -> None:
    """Call check(item) for one item after the other until a call raises no SampleError.

    If every call raises one, raise the first again. So a wrong configuration is noticed at once, although single
    samples may be bad. Without items nothing happens; other errors of `check` are raised.
    """
    problem: SampleError | None = None
    for item in items:
        try:
            check(item)
            return
        except SampleError as error:
            problem = problem or error
    if problem:
        raise problem


def too_many_in_a_row(limit: int, bad: Sequence[BadSample]) -> DataError:
    """Return the error that stops a run after `limit` consecutive bad samples. bad: these samples."""
    return DataError(f"{limit} samples in a row cannot be used (data.bad_in_a_row). {examples(bad)}")


def examples(bad: Sequence[BadSample]) -> str:
    """Return a text with the reasons of the first three bad samples, for the end of an error message."""
    return "For example:" + "".join(f"\n  {one.reason}" for one in bad[:3])
