"""The plan of a run: what it takes on some devices, as rows of (what, how much, by which formula)."""

import io
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from dyad.data.base.errors import UserError
from dyad.data.question_passage.questions import is_beir
from dyad.data.shards.index import SCANS, stored_index
from dyad.data.shards.scan_tar import Scan
from dyad.data.shards.sources import parse_sources, written_sources
from dyad.data.shards.storage import open_stream, scheme_of, stat
from dyad.train.config import Precision, TargetKind, TrainConfig
from dyad.train.distributed.world import World
from dyad.train.plan.cluster import planned_devices
from dyad.train.plan.dry_run import dry_run
from dyad.train.plan.objective import Sizes, objective_cost, planned_objective, written
from dyad.train.plan.towers import FakeTowers
from dyad.train.run.classes import with_classes
from dyad.train.step.chunks import chunk_count
from dyad.train.step.graph_cache import SPARE

PICTURES_PER_CORE = 1065  # a second, decoded and augmented: tests/benchmarks/RESULTS.md, "Loading pictures"
MOST_PAIRS = 1 << 22  # of a rank, in the search for the largest batch
LARGEST_SCAN = 1 << 30  # bytes of a shard without an index that is read to count its samples
Rows = dict[str, tuple[float, str]]  # what → how much, and the formula
Row = tuple[str, str, str]  # what, how much, and the formula


def print_plan(config: TrainConfig) -> None:
    """Print the plan of a run; or take the step of a dry run, and print what is known of it."""
    for line in dry_run(config) if config.plan.dry_run else RunPlan(config).lines():
        print(line)


class RunPlan:
    """What a run takes on the devices that its keys of `plan` name. pairs: of a rank in a step; chunk: of a chunk."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config = with_classes(config, World())
        self.devices = planned_devices(config)
        self.towers = FakeTowers(config, self.devices)
        self.cost = objective_cost(config, self.devices.count)
        self.samples, self.sample_bytes = counted_samples(config)
        self._state = planned_objective(config, round(self.samples or 1)).memory
        self.pairs = math.ceil(config.global_batch_size / self.devices.count)
        self.chunks = chunk_count(config.global_batch_size, self.devices.count, config.chunk_size)
        self.chunk = math.ceil(self.pairs / self.chunks)
        # with one process and one chunk .grad grows while the graph shrinks; the buckets of DDP are always there
        self._gradients_grow = self.devices.count == self.chunks == 1
        self._run = self.towers.run(self.chunk, self._gradients_grow)
        self._usable = (1 - SPARE) * self.devices.memory

    def memory(self, pairs: int, chunk: int) -> tuple[Rows, Rows]:
        """Return the bytes that a rank with so many pairs always holds, and those that each phase of a step adds."""
        config, towers, run, shards = self.config, self.towers, self._run, self.devices.shards
        trained, is_ddp, copies = towers.trained / shards, self.devices.count > shards == 1, 1 + self.devices.is_gpu
        stays: Rows = {
            "weights": (towers.weights / shards, f"4 bytes each / {shards} shards"),
            "moments": (towers.moments / shards, f"state of optim.name={config.optim.name} / {shards} shards"),
            "gradients": (trained * is_ddp, "of DDP's buckets, 4 bytes for each trained weight"),
            "average": (trained * (config.optim.ema is not None), "optim.ema: as the trained weights"),
            "target": (trained * (config.target.kind is not TargetKind.none), "target.kind: as the trained weights"),
            "whole weights": (towers.largest * (1 - 1 / shards), f"one tower at a time · (1 - 1 / {shards} shards)"),
            "inputs": (copies * towers.input_bytes(pairs), f"{copies} · {pairs:,} pairs: the next batch is there, too"),
        }
        if (state := self._state) is not None:
            share = state.num_samples / self.devices.count
            stays["state of samples"] = 4 * len(state.names) * share, f"4·{len(state.names)}·samples / ranks"
        chunks = math.ceil(pairs / chunk)
        kept, sizes = min(config.keep_graphs or 1, chunks), self._sizes(pairs)
        casts = 0 if self.devices.precision is Precision.fp32 else towers.weights / 2
        one = max(0.0, run.graph - casts) * chunk / self.chunk
        graphs = kept * one + min(casts, run.graph)
        forward, backward = ((most - run.graph) * chunk / self.chunk for most in (run.forward, run.backward))
        # gradients that are not in buckets: those of all chunks but the last, or of the only process
        backward += 0.0 if self._gradients_grow or (is_ddp and chunks == 1) else trained
        backward += 16 * pairs * towers.y.per_pair * sizes.D
        objective, formula = max(0.0, sizes.value(self.cost.memory)), written(self.cost.memory)
        phases = {
            "+ towers forward": (graphs + forward, f"graphs of {kept} · {chunk:,} pairs, and the largest operation"),
            "+ objective": (graphs + objective, f"graphs + {formula}; D = {sizes.D}"),
            "+ towers backward": (graphs + backward, "graphs + gradients + 16·b·D of the embeddings"),
            "+ optimiser": (trained * (not is_ddp), "gradients"),
        }
        return {what: row for what, row in stays.items() if row[0]}, phases

    def peak(self, pairs: int, chunk: int) -> float:
        """Return the most bytes that a rank with so many pairs, `chunk` at a time, holds at one time."""
        stays, phases = self.memory(pairs, chunk)
        return sum(size for size, _ in stays.values()) + max(size for size, _ in phases.values())

    def sent(self) -> Rows:
        """Return the bytes of the whole tensors of each kind of collective in a step; {} for one rank."""
        sizes, shards, trained = self._sizes(self.pairs), self.devices.shards, self.towers.trained
        is_half = self.devices.is_gpu and self.devices.precision is not Precision.fp32
        found: Rows = {}
        for kind, formula in self.cost.sent.items():
            if kind == "all-gather" and is_half and "B·D" in formula:  # of embeddings, which are fp32 on CPUs
                formula = {**formula, "B·D": formula["B·D"] / 2}
            found[f"{kind}, objective"] = sizes.value(formula), written(formula)
        if shards > 1:
            found["all-gather, weights"] = 2 * self.towers.weights, "for forward and for backward"
            found["reduce-scatter, gradients"] = trained, "4 bytes for each trained weight"
        if self.devices.count > shards:
            found["all-reduce, gradients"] = trained / shards, f"4 bytes for each trained weight / {shards} shards"
        return found

    def flops(self) -> Rows:
        """Return the FLOPs of a rank in a step."""
        run, b, kept = self._run, self.pairs, min(self.config.keep_graphs or 1, self.chunks)
        again = 1 - kept / self.chunks
        objective = b * self._sizes(b).value(self.cost.flops)
        return {
            "towers": (b * (run.forward_flops + run.backward_flops), f"b·(forward + backward), {b:,} pairs"),
            "forward again": (again * b * run.forward_flops, f"b·forward·{again:.3g}: {self.chunks} chunks"),
            "objective": (objective, f"b·({written(self.cost.flops)})"),
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the plan."""
        config, devices = self.config, self.devices
        yield f"{devices.count} × {devices.name}, {devices.precision}, {config.dist.name}; {config.task}"
        yield from _table(f"Memory of a rank, objective={config.objective.name}", self._memory())
        sent = ((what, _bytes(size), formula) for what, (size, formula) in self.sent().items())
        yield from _table("Sent in a step: bytes of the whole tensors", sent)
        total = sum(count for count, _ in self.flops().values())
        seconds = devices.peak and total / (config.plan.mfu * devices.peak)
        steps, samples = config.steps, self.samples
        if steps is None and samples and config.epochs:
            steps = math.ceil(config.epochs * samples / config.global_batch_size)
        yield from _table("Time", self._time(steps, seconds))
        yield from _table("Data", self._data(steps, seconds))
        if config.also:
            yield f"not counted: also.{', also.'.join(config.also)}"

    def _memory(self) -> Iterator[Row]:
        b, usable = self.pairs, self._usable
        stays, phases = self.memory(b, self.chunk)
        yield from ((what, _bytes(size), formula) for what, (size, formula) in (stays | phases).items())
        peak = self.peak(b, self.chunk)
        fits = "fits" if peak <= usable else "DOES NOT FIT"
        device = f"{_bytes(self.devices.memory)}, of which a tenth stays free"
        yield "peak", _bytes(peak), f"what stays + the largest phase: {fits} into {device}"
        largest = bisect_right(range(1, b + 1), usable, key=lambda n: self.peak(b, n))
        yield "largest chunk_size", f"{largest:,}", f"of {b:,} pairs of a rank"
        for what, chunk in (("in one chunk", MOST_PAIRS), (f"in chunks of {self.chunk}", self.chunk)):
            pairs = range(1, MOST_PAIRS + 1)
            largest = bisect_right(pairs, usable, key=lambda n, chunk=chunk: self.peak(n, min(n, chunk)))
            yield f"largest batch {what}", f"{largest * self.devices.count:,}", f"{largest:,} pairs of a rank · ranks"

    def _time(self, steps: int | None, seconds: float | None) -> Iterator[Row]:
        run, peak = self._run, self.devices.peak
        yield "a pair, forward", f"{run.forward_flops / 1e9:,.4g} GFLOP", "both towers; texts of full length"
        yield "a pair, backward", f"{run.backward_flops / 1e9:,.4g} GFLOP", "both towers"
        for what, (count, formula) in self.flops().items():
            yield f"a step, {what}", f"{count / 1e12:,.4g} TFLOP", formula
        formula = f"sum / (plan.mfu={self.config.plan.mfu:g} · {peak / 1e12:,.4g} TFLOP/s)" if peak else "set plan.gpu"
        yield "a step", _or_unknown(seconds, " s"), formula
        yield "steps", _or_unknown(steps), "steps, or epochs · samples / B"
        yield "the run", _or_unknown(steps and seconds and steps * seconds / 3600, " h"), "steps · seconds of a step"

    def _data(self, steps: int | None, seconds: float | None) -> Iterator[Row]:
        config, samples, size = self.config, self.samples, self.sample_bytes
        B, k, classes = config.global_batch_size, config.data.negatives.per_row, len(config.run.classes or [])
        formula = "classes - 1" if classes > 1 else f"B·(1 + {k}) - 1, {k} hard negatives a row"
        yield "negatives of an anchor", f"{classes - 1 if classes > 1 else B * (1 + k) - 1:,}", formula
        yield "samples", _or_unknown(samples), "of data.train, by its indexes or its first shard"
        yield "bytes of a sample", _or_unknown(size), "bytes of data.train / samples"
        yield "epochs", _or_unknown(steps and samples and steps * B / samples), "steps · B / samples"
        for whose, gpus in (("GPU", 1), ("node", min(config.plan.gpus_per_node, self.devices.count))):
            rate = seconds and gpus * self.pairs / seconds
            yield (
                f"pairs/s of a {whose}",
                _or_unknown(rate),
                f"{gpus} · b / seconds of a step: the loader must give them",
            )
            if config.has_pictures:
                formula = f"pairs/s / {PICTURES_PER_CORE} pictures that a core decodes and augments (RESULTS.md)"
                yield f"cores of a {whose}", _or_unknown(rate and rate / PICTURES_PER_CORE), formula
            yield f"read by a {whose}", _or_unknown(rate and size and rate * size / 1e6, " MB/s"), "pairs/s · bytes"

    def _sizes(self, pairs: int) -> Sizes:
        return Sizes(pairs, self.devices.count, self.towers.width, self.devices.tile)


def counted_samples(config: TrainConfig) -> tuple[float | None, float | None]:
    """Return how many samples an epoch has, and the mean bytes of one; None for data that only training can count."""
    try:
        if config.data.train is None or any(
            is_beir(of.path) for of in written_sources(config.data.train, "data.train")
        ):
            return None, None
        shards = [(path, of.weight) for of in parse_sources(config.data.train) for path in of.shards]
        size = _sample_bytes(shards[0][0])
        return (size and sum(weight * stat(path).size for path, weight in shards) / size), size
    except (UserError, OSError):
        return None, None


def _sample_bytes(path: str) -> float | None:
    """Return the mean bytes of a sample of a shard: from its index, else from a scan, which stores nothing."""
    if (index := stored_index(path)) is not None:
        return index.size / index.samples
    scan = SCANS.get(os.path.splitext(path)[1])
    if scan is None or scheme_of(path) or stat(path).size > LARGEST_SCAN:
        return None
    with open_stream(path) as raw:
        found = scan(io.BufferedReader(raw, 1 << 20))  # type: ignore[type-var]
    return stat(path).size / len(found.samples if isinstance(found, Scan) else found.crc32)


def _table(title: str, rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of a part of the plan: its title, and its rows in columns."""
    listed = list(rows)
    first, second = (max((len(row[i]) for row in listed), default=0) for i in (0, 1))
    yield f"\n{title}"
    yield from (f"  {what:<{first}}  {much:>{second}}  {formula}" for what, much, formula in listed)


def _or_unknown(number: float | None, unit: str = "") -> str:
    digits = ".0f" if number and number >= 1000 else ".4g"
    return f"{number:,{digits}}{unit}" if number else "unknown"


def _bytes(size: float) -> str:
    power = min(3, int(math.log(max(size, 1), 1024)))
    return f"{size / 1024**power:,.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
