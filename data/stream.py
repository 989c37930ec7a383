"""Pairs out of shards that can only be read from end to end: a stream of draws that never ends.

Which shard draw k is, is a function of (seed, k): each once in a pass over all, more or less often by its weight. Draws
are dealt to readers, one in each loader process of each rank: reader r of R takes draws r, r + R, … It gives as many
samples as it is asked for, whatever is in the shards: every rank takes every step. What is random about a sample comes
from (seed, draw, place in the shard).

The shards are webdataset's; its pipeline is not used. Its reader leaves out without a word what lies behind damage, so
a shard is walked through as strictly as the index does. Its shuffle buffer may hold a sample for ever, so that no shard
is ever surely used up; here samples are mixed block by block, and a run that goes on begins few shards anew.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import torch

from data.batch import Bad, Batch
from data.config import DataConfig
from data.errors import ConfigError, DataError, SampleError
from data.image_text import Pair, PairMaker
from data.order import Order
from data.pull import open_sequential
from data.sample import Sample
from data.scan import Problem, Problems, Scan, ScannedSample, stream_tar
from data.sources import ShardSource
from data.storage import shard_name
from data.substitutes import cases
from data.workers import at, served

NO_ID = -1
LOOKED_AT = 10  # samples at the start, for a key that none of them has
FEWEST = 3  # shards in a row that give nothing, before a run stops
SHOWN = 3  # places in a shard that are named


@dataclass
class StreamBatch(Batch):
    """A batch, and what its reader went through for it. bad: also shards of which something could not be read.

    taken: samples used up, by draw; ended: samples in all, of draws whose shard was read to its end meanwhile.
    """

    taken: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OneEpoch:
    """What data.order.Order tells of samples that nobody has counted: the whole run is an epoch."""

    steps_per_epoch: int
    sizes: Sequence[int] = ()


@dataclass
class Progress:
    """Which draws are used up: all below `first`, and those in `through`. taken, ended: of the others.

    Of batches that the trainer took, not of those that loader processes made ahead.
    """

    first: int = 0
    through: set[int] = field(default_factory=set)
    taken: Counter[int] = field(default_factory=Counter)
    ended: dict[int, int] = field(default_factory=dict)

    def add(self, batch: StreamBatch) -> None:
        self.taken.update(batch.taken)
        self.ended |= batch.ended
        for draw in {*batch.taken, *batch.ended}:
            if self.ended.get(draw) == self.taken[draw]:
                self.through.add(draw)
                del self.ended[draw], self.taken[draw]


@dataclass(frozen=True)
class Drawn:
    """A sample, its draw and its place in the shard."""

    draw: int
    place: int
    shard: str
    key: str
    sample: Sample


class Stream:
    """Training pairs of a stream, by step. Can be pickled until it is read from.

    Raises DataError when none of the first samples can be used as configured.
    """

    def __init__(
        self, sources: Sequence[ShardSource], maker: PairMaker, config: DataConfig, *, seed: int, global_batch_size: int
    ) -> None:
        self.shards = [shard for source in sources for shard in source.shards]
        self.maker, self.id_key, self.buffer = maker, config.id_key, config.buffer
        self.most = config.tolerated  # samples in a row that cannot be used; 0: nothing may be lost
        self.seed, self.global_batch_size = seed, global_batch_size
        sizes, weights = [len(source.shards) for source in sources], [source.weight for source in sources]
        for size, weight in zip(sizes, weights, strict=True):
            if not round(size * weight):
                raise ConfigError(f"data.train: @{weight:g} of {size} shards is less than one in a pass of the stream")
        self._draws = Order(sizes, weights, seed=seed, global_batch_size=1, shuffle="full")  # of shards, one a step
        known = [[shard_name(shard) for shard in self.shards], weights]
        self.fingerprint = hashlib.sha256(json.dumps(known).encode()).hexdigest()
        self.progress = Progress()
        self._rank, self._world_size, self._readers = 0, 1, 1
        self._reader: Reader | None = None
        self._check()

    @property
    def draws_per_pass(self) -> int:
        return self._draws.steps_per_epoch

    def begin(self, rank: int, world_size: int, workers: int, state: Mapping[str, Any] | None) -> str:
        """Take a place among the readers, where a checkpoint left off: `state`. Returns what is to be said about it.

        Any number of ranks and workers can go on from a state.
        """
        self._rank, self._world_size, self._readers = rank, world_size, max(workers, 1)
        readers, shards = world_size * self._readers, self.draws_per_pass
        said = f"stream: {shards} shards a pass, read by {readers} {'process' if readers == 1 else 'processes'}"
        if shards < readers:
            said += (
                ": several read the same shard, each in a pass of its own, so a batch may hold a sample twice. More "
                "shards or fewer data.workers avoid it"
            )
        if state is not None:
            self.progress = Progress(state["first"], set(state["through"]))
            again = sum(count for _, count in state["taken"])
            said += (
                f"\nstream: goes on in pass {state['first'] // shards}. {len(state['taken'])} shards were read in part "
                f"and begin anew: {again} samples come again, none is left out"
            )
        return said

    def batches(self, first_step: int, last_step: int, *, workers: int, timeout: float) -> Iterator[Batch]:
        """This rank's part of the batches of steps first_step … last_step - 1, in `progress` as they are taken."""
        steps, pin = range(first_step, last_step), torch.cuda.is_available()
        for batch in served(self, steps, workers=workers, timeout=timeout, rank=self._rank, pin=pin):
            self.progress.add(batch)
            yield batch

    def state(self, gather: Callable[[Progress], Sequence[Progress]]) -> dict[str, Any]:
        """The progress of all ranks, plain and small, for a checkpoint. A collective if `gather` is."""
        parts = gather(self.progress)
        first, through = self.progress.first, set[int]().union(*(part.through for part in parts))
        while first in through:
            first += 1
        self.progress.first = first
        self.progress.through = {draw for draw in self.progress.through if draw > first}
        taken = sorted([draw, count] for part in parts for draw, count in part.taken.items())
        return {"first": first, "through": sorted(draw for draw in through if draw > first), "taken": taken}

    def __getitem__(self, step: int, /) -> StreamBatch:
        """The next batch of a reader; which one follows from the step, since workers take steps in turns."""
        number = self._rank * self._readers + step % self._readers
        if self._reader is None:
            self._reader = Reader(self, number, self._world_size * self._readers)
        assert self._reader.number == number, "a process is one reader"
        first, last = (r * self.global_batch_size // self._world_size for r in (self._rank, self._rank + 1))
        return self._reader.batch(last - first)

    def place(self, item: int) -> str:
        """The shard that a draw is."""
        return self.shards[int(self._draws.ids(item)[0])]

    def sample_id(self, sample: Sample) -> int:
        """The number that data.id_key says."""
        if self.id_key is None:
            return NO_ID
        value = sample.field(self.id_key)
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise SampleError(f"{sample.where}: '{self.id_key}' is {value!r:.80}, no number of a sample: 0, 1, …")
        return value

    def _check(self) -> None:
        """A wrong key in the configuration shows before any process starts: then no sample can be used."""
        errors = []
        for drawn in islice(Reader(self, 0, 1).drawn(), LOOKED_AT):
            try:
                self.maker.check(drawn.sample)
                self.sample_id(drawn.sample)
                return
            except SampleError as error:
                errors.append(error)
        raise errors[0]


class Reader:
    """One of `readers` that share the draws of a stream. Gives samples without end."""

    def __init__(self, stream: Stream, number: int, readers: int) -> None:
        self.number, self._readers, self._stream = number, readers, stream
        self._ended: dict[int, int] = {}
        self._bad: list[Bad] = []
        self._bad_in_a_row: list[Bad] = []
        self._mixed = self._blocks()

    def batch(self, size: int) -> StreamBatch:
        """The next `size` samples that can be used. Raises DataError when too many in a row cannot."""
        pairs: list[Pair] = []
        taken = Counter[int]()
        while len(pairs) < size:
            drawn = next(self._mixed)
            taken[drawn.draw] += 1
            try:
                sample_id = self._stream.sample_id(drawn.sample)
                pairs.append(self._stream.maker.pair(drawn.sample, sample_id, epoch=drawn.draw, place=drawn.place))
                self._bad_in_a_row = []
            except SampleError as error:
                bad = Bad(len(pairs), NO_ID, drawn.shard, drawn.key, str(error), NO_ID)
                self._tell(bad)
                self._bad_in_a_row.append(bad)
            if self._bad_in_a_row and len(self._bad_in_a_row) >= self._stream.most:
                raise DataError(
                    f"{self._stream.most} samples in a row cannot be used (data.bad_in_a_row). "
                    f"{cases(self._bad_in_a_row)}"
                )
        batch = self._stream.maker.batch(pairs, tuple(self._bad))
        ended, self._ended, self._bad = self._ended, {}, []
        return StreamBatch(**vars(batch), taken=dict(taken), ended=ended)

    def _blocks(self) -> Iterator[Drawn]:
        """`buffer` samples at a time, in random order."""
        samples = self.drawn()
        while block := list(islice(samples, self._stream.buffer)):
            random.Random(f"{self._stream.seed}/{block[0].draw}/{block[0].place}").shuffle(block)
            yield from block

    def drawn(self) -> Iterator[Drawn]:
        """Samples in the order of draws and shards. Raises DataError when shard after shard gives none."""
        useless: list[Bad] = []
        limit = max(-(-self._stream.draws_per_pass // self._readers), FEWEST)
        for draw in self._dealt():
            at(draw)
            shard, scan, samples = self._stream.place(draw), Scan(), 0
            for found, members in _walk(shard, scan):
                yield Drawn(draw, samples, shard, found.key, Sample(f"{shard}: sample '{found.key}'", members))
                samples += 1
            self._ended[draw] = samples
            if scan.problems.count:
                self._tell(_lost(shard, scan.problems))
            elif not samples:
                scan.problems.add(Problem(0, "there is no sample in it"))
            useless = [] if samples else [*useless, _lost(shard, scan.problems)]
            if len(useless) >= limit:
                raise DataError(f"{len(useless)} shards in a row gave no sample. {cases(useless)}")

    def _dealt(self) -> Iterator[int]:
        """This reader's draws that are not used up."""
        progress = self._stream.progress
        first = progress.first + (self.number - progress.first) % self._readers
        return (draw for draw in count(first, self._readers) if draw not in progress.through)

    def _tell(self, bad: Bad) -> None:
        if not self._stream.most:
            raise DataError(bad.reason)
        self._bad.append(bad)


def first_of(shard: str) -> Sample:
    """Raises DataError when there is none."""
    scan = Scan()
    for found, members in _walk(shard, scan):
        return Sample(f"{shard}: sample '{found.key}'", members)
    raise DataError(_lost(shard, scan.problems).reason if scan.problems.count else f"{shard}: there is no sample in it")


def _walk(shard: str, scan: Scan) -> Iterator[tuple[ScannedSample, dict[str, bytes]]]:
    """Samples with their members by suffix; what is wrong with the shard or its storage goes into `scan`."""
    last = None
    try:
        with open_sequential(shard) as content:
            for last, members in stream_tar(content, scan):
                yield last, members
    except OSError as error:
        if last is None:
            scan.problems.add(Problem(0, f"cannot be read: {error}"))
        else:
            scan.problems.add(Problem(last.offset, f"cannot be read on from sample '{last.key}': {error}", last=True))


def _lost(shard: str, problems: Problems) -> Bad:
    said = [str(problem) for problem in problems.first[:SHOWN]]
    if problems.count > SHOWN:
        said.append(f"{problems.count - SHOWN} more such places")
    if problems.first[-1].last:
        said.append("what is there and all that follows are left out")
    return Bad(0, NO_ID, shard, "", f"{shard}: {'; '.join(said)}", NO_ID)
