"""Training data for data.mode=stream: pairs from shards that are only read from start to end. A stream is an endless
sequence of draws; each draw is one shard to be read.

The shard of draw k is a function of (seed, k): in one pass over all shards each comes once, or as often as its weight
says. The draws are dealt to R readers, one in each loader process of each training process: reader r takes the draws r,
r + R, r + 2 R, …. As the draws are endless, every reader has samples for every step, however many samples its shards
hold. All random parts of a sample depend only on (seed, draw, position in the shard).

The shards have webdataset's format, but are not read with its library. Its reader silently skips what follows a damaged
part; here the tar of a shard is parsed as strictly as by the index. Its shuffle buffer may hold a sample for ever, so
that no shard is ever known to be used up; here samples are mixed block by block, and a resumed run restarts only a few
shards.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

from dyad.data.base.errors import ConfigError, DataError, SampleError
from dyad.data.batch import BadSample, Batch
from dyad.data.config import DataConfig
from dyad.data.image_text.dataset import PairMaker, TrainingPair
from dyad.data.image_text.sample import ShardSample
from dyad.data.loading.batch_parts import batches_of_parts
from dyad.data.loading.order import Order, local_rows
from dyad.data.loading.replacement import check_any, examples, too_many_in_a_row
from dyad.data.loading.workers import begin_item
from dyad.data.shards.content_keys import json_digest
from dyad.data.shards.scan_tar import Problem, Problems, Scan, stream_tar
from dyad.data.shards.sources import ShardSource
from dyad.data.shards.storage import open_sequential, shard_name

NO_ID = -1  # sample id of a sample without data.id_key
CHECKED = 10  # samples checked at the start: a wrong key in the configuration makes all of them bad
MIN_EMPTY = 3  # consecutive shards without a sample that stop a run, at the least
SHOWN = 3  # damaged places of a shard that a message lists


@dataclass
class StreamBatch(Batch):
    """A batch of a stream, and which samples of each draw it used. A draw is one shard to be read (module docstring).

    bad: also lists shards that could not be read completely. taken: draw → number of its samples used for this batch,
    bad ones included. ended: draw → number of samples in its shard, for shards that were read to their end while the
    batch was made.
    """

    taken: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OneEpoch:
    """Takes the place of `Order` (data/loading/order.py) in a streaming run: the whole run is one epoch.

    steps_per_epoch: the number of steps of the run; the number of samples in a stream is not known beforehand. sizes:
    empty, as no size is known.
    """

    steps_per_epoch: int
    sizes: Sequence[int] = ()


@dataclass
class StreamProgress:
    """The draws of a stream that are used up: all with an index below `first`, and those in `finished`. A draw is one
    shard to be read (module docstring).

    taken: draw → number of its samples that the trainer has received. ended: draw → number of samples in its shard,
    once known. Both have only draws that are not used up. Batches that loader processes prepared ahead do not count.
    """

    first: int = 0
    finished: set[int] = field(default_factory=set)
    taken: Counter[int] = field(default_factory=Counter)
    ended: dict[int, int] = field(default_factory=dict)

    def add(self, batch: StreamBatch) -> None:
        """Record that the trainer has received a batch. Counts the batch's samples for each draw (one shard to be
        read); a draw is marked as used up when all samples of its shard were received."""
        self.taken.update(batch.taken)
        self.ended |= batch.ended
        for draw in {*batch.taken, *batch.ended}:
            if self.ended.get(draw) == self.taken[draw]:
                self.finished.add(draw)
                del self.ended[draw], self.taken[draw]


@dataclass(frozen=True)
class StreamSample:
    """A sample of a stream. draw: index of the draw (shard to be read) that gave it. position: its index in the shard,
    from 0."""

    draw: int
    position: int
    sample: ShardSample


class Stream:
    """The training data for data.mode=stream. After `begin`, `batches` yields a batch for each step. Can be pickled
    until a batch is read."""

    def __init__(
        self, sources: Sequence[ShardSource], maker: PairMaker, config: DataConfig, *, seed: int, global_batch_size: int
    ) -> None:
        """Set up a stream: the order in which its shards are read. Reads at most CHECKED samples, until one is usable.

        sources: lists of shards, each with a weight. maker: makes training pairs and batches. seed: the seed of the
        run, on which the order depends. global_batch_size: samples of one step in all training processes together.

        Raises SampleError when none of these samples can be used as configured. Raises DataError when as many shards in
        a row as a pass has (at least MIN_EMPTY) give no sample, or one is damaged and data.bad_samples=stop. Raises
        ConfigError for a weight so small that its source would never be read, and when the package that reads a URL is
        not installed.
        """
        self.shards = [shard for source in sources for shard in source.shards]
        self.maker, self.id_key, self.buffer = maker, config.id_key, config.buffer
        self.limit = config.bad_in_a_row_limit  # consecutive bad samples that stop the run; 0: any lost sample stops it
        self.seed, self.global_batch_size = seed, global_batch_size
        sizes, weights = [len(source.shards) for source in sources], [source.weight for source in sources]
        for size, weight in zip(sizes, weights, strict=True):
            if not round(size * weight):
                raise ConfigError(f"data.train: @{weight:g} of {size} shards is less than one in a pass of the stream")
        # the samples of this order are shards, and each step is one draw
        self._draws = Order(sizes, weights, seed=seed, global_batch_size=1, shuffle="full")
        self.draws_per_pass = self._draws.steps_per_epoch
        self.fingerprint = json_digest([[shard_name(shard) for shard in self.shards], weights])
        self.progress = StreamProgress()
        self._rank, self._world_size, self._readers = 0, 1, 1
        self._reader: Reader | None = None
        check_any(islice(Reader(self, 0, 1).samples(), CHECKED), self._check)

    def begin(self, rank: int, world_size: int, workers: int, state: Mapping[str, Any] | None) -> str:
        """Set how many readers share the stream, and which of them run in this training process. Call it once, before
        `batches`. Returns a text for the log.

        rank, world_size: index of this process and number of training processes. workers: number of loader processes of
        each training process; 0: this process reads. state: the progress in a checkpoint, as `state` returned it, from
        which the stream continues; None: start at the beginning. Shards that were read in part begin anew. The run that
        wrote it may have had other numbers of processes.
        """
        self._rank, self._world_size, self._readers = rank, world_size, max(workers, 1)
        readers, shards = world_size * self._readers, self.draws_per_pass
        text = f"stream: {shards} shards a pass, read by {readers} {'process' if readers == 1 else 'processes'}"
        if shards < readers:
            text += (
                ": several read the same shard, each in a pass of its own, so a batch may hold a sample twice. More "
                "shards or fewer data.workers avoid it"
            )
        if state is not None:
            self.progress = StreamProgress(state["first"], set(state["through"]))
            again = sum(count for _, count in state["taken"])
            text += (
                f"\nstream: goes on in pass {state['first'] // shards}. {len(state['taken'])} shards were read in part "
                f"and begin anew: {again} samples come again, none is left out"
            )
        return text

    def batches(
        self,
        first_step: int,
        last_step: int,
        *,
        workers: int,
        timeout: float,
        ahead: Callable[[Iterator[StreamBatch]], Iterator[StreamBatch]] = iter,
        noise_later: bool = False,
    ) -> Iterator[Batch]:
        """Yield this training process's batch of each of the steps first_step … last_step - 1.

        Each batch is added to the attribute `progress` just before it is yielded. workers: number of loader processes,
        as given to `begin`. timeout: seconds that a loader process may take for a sample before HardwareError is
        raised; 0: no limit. ahead: wraps the iterator of batches, to copy them to the device before their step.
        noise_later: whether noise is left out of the images, to be added on the device by Batch.with_noise. Raises
        DataError as `Reader.batch` does.
        """
        rows = local_rows(self.global_batch_size, self._rank, self._world_size)
        count, steps = rows.stop - rows.start, range(first_step, last_step)
        options = {"where": self.shard_of, "timeout": timeout, "rank": self._rank}
        for batch in ahead(batches_of_parts(self._part, steps, count, workers, noise_later, **options)):
            self.progress.add(batch)
            yield batch

    def state(self, gather: Callable[[StreamProgress], Sequence[StreamProgress]]) -> dict[str, Any]:
        """Return the progress of a stream in all training processes, as a dict for JSON that a checkpoint can hold.

        It says which shards were read, and how far; `begin` takes it. Sets `progress.first` to the first draw that no
        process has used up, and drops the draws below it from `progress.finished`. gather: takes the progress of this
        process and returns the progress of each process. If it communicates, all processes must call `state` together.
        """
        parts = gather(self.progress)
        first, finished = self.progress.first, set[int]().union(*(part.finished for part in parts))
        while first in finished:
            first += 1
        self.progress.first = first
        self.progress.finished = {draw for draw in self.progress.finished if draw > first}
        taken = sorted([draw, count] for part in parts for draw, count in part.taken.items())
        return {"first": first, "through": sorted(draw for draw in finished if draw > first), "taken": taken}

    def shard_of(self, draw: int) -> str:
        """Return the path of the shard that a draw reads. draw: its index in the stream, from 0."""
        return self.shards[int(self._draws.ids(draw)[0])]

    def sample_id(self, sample: ShardSample) -> int:
        """Return the id of a sample: the whole number in the json field that data.id_key names; NO_ID if data.id_key is
        None. Raises SampleError when the field is missing or has another value."""
        if self.id_key is None:
            return NO_ID
        value = sample.field(self.id_key)
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise SampleError(f"{sample.where}: '{self.id_key}' is {value!r:.80}, no number of a sample: 0, 1, …")
        return value

    def _part(self, step: int, part: int, rows: slice) -> StreamBatch:
        """Return a batch of the next samples of the one reader in this loader process.

        The first call creates the reader. part: number of the part, counted over all steps. Modulo the number of loader
        processes it is the number of this reader among those of its training process. This remainder is the same in all
        calls of a loader process, because torch deals parts to its loader processes in turn. rows: a slice, whose
        length is the number of samples. step: not used.
        """
        number = self._rank * self._readers + part % self._readers
        self._reader = self._reader or Reader(self, number, self._world_size * self._readers)
        assert self._reader.number == number, "a process is one reader"
        return self._reader.batch(rows.stop - rows.start)

    def _check(self, found: StreamSample) -> None:
        self.maker.check(found.sample)
        self.sample_id(found.sample)


class Reader:
    """Reads some of the shards of a stream, and returns their samples in batches, without end. Several readers share
    the draws (shards to be read) of a stream; each loader process has one reader.

    readers: number of readers in all processes. number: index of this reader, from 0.
    """

    def __init__(self, stream: Stream, number: int, readers: int) -> None:
        self.number, self._readers, self._stream = number, readers, stream
        self._ended: dict[int, int] = {}
        self._bad: list[BadSample] = []
        self._bad_in_a_row: list[BadSample] = []
        self._mixed = self._mix()

    def batch(self, size: int) -> StreamBatch:
        """Return a batch of the next `size` usable samples. Unusable samples are skipped, and listed in Batch.bad.
        Raises DataError after data.bad_in_a_row consecutive bad samples, for any bad sample with data.bad_samples=stop,
        and in the cases of the method `samples`."""
        pairs: list[TrainingPair] = []
        taken = Counter[int]()
        while len(pairs) < size:
            found = next(self._mixed)
            taken[found.draw] += 1
            try:
                sample_id = self._stream.sample_id(found.sample)
                pair = self._stream.maker.pair(found.sample, sample_id, epoch=found.draw, position=found.position)
                pairs.append(pair)
                self._bad_in_a_row = []
            except SampleError as error:
                bad = BadSample(len(pairs), NO_ID, found.sample.shard, found.sample.key, str(error), NO_ID)
                self._report(bad)
                self._bad_in_a_row.append(bad)
                if len(self._bad_in_a_row) == self._stream.limit:
                    raise too_many_in_a_row(self._stream.limit, self._bad_in_a_row) from error
        batch = self._stream.maker.batch(pairs, tuple(self._bad))
        ended, self._ended, self._bad = self._ended, {}, []
        return StreamBatch(**vars(batch), taken=dict(taken), ended=ended)

    def _mix(self) -> Iterator[StreamSample]:
        """Yield all samples of the method `samples`, shuffled within blocks of data.buffer consecutive samples. The
        shuffle of a block depends only on the seed and on the first sample's place in the stream."""
        samples = self.samples()
        while block := list(islice(samples, self._stream.buffer)):
            random.Random(f"{self._stream.seed}/{block[0].draw}/{block[0].position}").shuffle(block)
            yield from block

    def samples(self) -> Iterator[StreamSample]:
        """Yield, in order, the samples of all draws (shards to be read) of this reader, without end.

        Draws that are used up already are skipped. The next batch will report the draws whose shards were read to their
        end, and damaged shards. Raises DataError when as many consecutive shards have no sample as the reader reads in
        a pass (at least MIN_EMPTY), and for a damaged shard with data.bad_samples=stop.
        """
        progress, empty = self._stream.progress, list[BadSample]()
        limit = max(-(-self._stream.draws_per_pass // self._readers), MIN_EMPTY)
        first = progress.first + (self.number - progress.first) % self._readers
        for draw in count(first, self._readers):
            if draw in progress.finished:
                continue
            shard, scan, samples = self._stream.shard_of(draw), Scan(), 0
            begin_item(draw)
            for sample in _read_samples(shard, scan):
                begin_item(draw)
                yield StreamSample(draw, samples, sample)
                samples += 1
            self._ended[draw] = samples
            if scan.problems.count:
                self._report(_lost_part(shard, scan.problems))
            elif not samples:
                scan.problems.add(Problem(0, "there is no sample in it"))
            empty = [] if samples else [*empty, _lost_part(shard, scan.problems)]
            if len(empty) >= limit:
                raise DataError(f"{len(empty)} shards in a row gave no sample. {examples(empty)}")

    def _report(self, bad: BadSample) -> None:
        """Record an unusable sample, or a part of a shard that could not be read: the next batch that this reader
        returns will list it in `Batch.bad`. With the setting data.bad_samples=stop, raises DataError instead."""
        if not self._stream.limit:
            raise DataError(bad.reason)
        self._bad.append(bad)


def first_sample(shard: str) -> ShardSample:
    """Return the first sample of a shard. Raises DataError, with the reason, when no sample can be read."""
    scan = Scan()
    for sample in _read_samples(shard, scan):
        return sample
    if not scan.problems.count:
        raise DataError(f"{shard}: there is no sample in it")
    raise DataError(_lost_part(shard, scan.problems).reason)


def _read_samples(shard: str, scan: Scan) -> Iterator[ShardSample]:
    """Yield the samples of a shard. scan: an empty Scan, which this function fills with what it finds in the shard.

    If the shard is damaged or its storage fails, nothing is raised: the problem is added to scan.problems, and what
    cannot be read is left out. Raises ConfigError when the package that reads the shard's URL is not installed.
    """
    last = None
    try:
        with open_sequential(shard) as content:
            for last, members in stream_tar(content, scan):
                yield ShardSample(shard, last.key, members)
    except OSError as error:
        if last is None:
            scan.problems.add(Problem(0, f"cannot be read: {error}"))
        else:
            scan.problems.add(Problem(last.offset, f"cannot be read on from sample '{last.key}': {error}", last=True))


def _lost_part(shard: str, problems: Problems) -> BadSample:
    """Return an entry for `Batch.bad` about a shard without samples, or a part of a shard that could not be read.
    problems: the problems of the shard, at least one, from which the reason of the entry is made."""
    reasons = [str(problem) for problem in problems.first[:SHOWN]]
    if problems.count > SHOWN:
        reasons.append(f"{problems.count - SHOWN} more such places")
    if problems.first[-1].last:
        reasons.append("what is there and all that follows are left out")
    return BadSample(0, NO_ID, shard, "", f"{shard}: {'; '.join(reasons)}", NO_ID)
