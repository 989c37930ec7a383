"""The plan of a run: its memory, traffic, time and data on given devices, as Rows (name, amount, unit, formula)."""

import math
from bisect import bisect_right
from contextlib import suppress

import numpy as np

from dyad.data.base.errors import UserError
from dyad.data.question_passage.questions import is_beir
from dyad.data.shards.index import has_index, index_shards
from dyad.data.shards.sources import parse_sources, written_sources
from dyad.data.shards.storage import scheme_of, stat
from dyad.plan.cluster import planned_devices
from dyad.plan.objective import formula_text, objective_cost, planned_objective, products, value_of
from dyad.plan.rows import Rows, amount_text
from dyad.plan.speed import planned_mfu, samples_per_core, seconds_sent
from dyad.plan.towers import FakeTowers, nbytes
from dyad.run.class_names import resolve_classes
from dyad.train.config import Precision, TargetKind, TrainConfig
from dyad.train.distributed.world import World
from dyad.train.losses.options.common import SCORED
from dyad.train.run_schedule import total_steps
from dyad.train.step.chunks import chunk_count
from dyad.train.step.graph_cache import SPARE

MOST_PAIRS = 1 << 22  # pairs of a rank: the limit of the search for the largest batch
LARGEST_SCAN = 1 << 30  # bytes of a shard without an index that is indexed to count its samples


class RunPlan:
    """The memory, traffic, time and data of a run on the devices that its keys plan.* name.

    The methods `largest`, `sent`, `time` and `data` return Rows: name → (amount, unit, formula as text); `memory`
    returns two Rows, `peak` a number of bytes. Attributes: pairs: the pairs of a rank in a step. chunks: the number of
    chunks into which they are cut. chunk: the pairs of a chunk. towers, cost: measured costs of towers and objective.
    steps: number of steps of the run. samples: samples in an epoch. sample_bytes: mean bytes of a sample. steps,
    samples and sample_bytes are NaN if unknown.
    """

    def __init__(self, config: TrainConfig, like: "RunPlan | None" = None) -> None:
        """Measure towers on fake tensors and the objective by small steps on the CPU; this takes seconds.

        The first shard is indexed if it is small and has no index. like: a plan with as many devices and the same
        objective, which is not checked. Its measurements of the objective are reused, and those of the towers if the
        section `model`, the precision and the chunks are equal. Raises ConfigError for a model or objective that cannot
        be built, and with torch before 2.15.
        """
        self.config = config = resolve_classes(config, World())
        self.devices = planned_devices(config)
        self.pairs = math.ceil(config.global_batch_size / self.devices.count)
        self.chunks = chunk_count(config.global_batch_size, self.devices.count, config.chunk_size)
        self.chunk = math.ceil(self.pairs / self.chunks)
        self._usable = (1 - SPARE) * self.devices.memory
        self._is_ddp = self.devices.count > self.devices.shards == 1
        self._is_half = self.devices.precision is not Precision.fp32
        # sends embeddings and weights in half precision; on CPUs these stay float32
        self._sends_half = self._is_half and self.devices.is_gpu
        self._has_target = config.target.kind is not TargetKind.none
        # with one process and one chunk, gradients are allocated as the graph is freed; DDP's buckets always exist
        self._gradients_grow = self.devices.count == self.chunks == 1
        self._kept = (config.keep_graphs or 1) if self.devices.shards == 1 else 1  # graphs, see loss_term.py
        self._of_towers = config.model, self.devices.precision, self.chunk, self._gradients_grow
        if like and like._of_towers == self._of_towers:
            self.towers = like.towers
        else:
            self.towers = FakeTowers(config, self.devices, self.chunk, self._gradients_grow)
        self.cost = like.cost if like else objective_cost(config, self.devices.count)
        self.samples, self.sample_bytes = counted_samples(config)
        self._mfu = planned_mfu(config, self.towers.forward_flops)
        batches = self.samples // config.global_batch_size  # NaN where the samples are not known
        self.steps = config.steps or (batches if math.isnan(batches) else total_steps(config, max(1, int(batches))))
        samples = config.global_batch_size if math.isnan(self.samples) else round(self.samples)
        state = planned_objective(config, samples).sample_state
        self._state = 4 * len(state.names) * state.num_samples / self.devices.count if state else 0.0

    def memory(self, pairs: int, chunk: int) -> tuple[Rows, Rows]:
        """Return (rows of the bytes that a rank always holds, rows of the bytes that each phase of a step adds).

        pairs: pairs of the rank in a step. chunk: pairs of a chunk.
        """
        config, towers, shards = self.config, self.towers, self.devices.shards
        trained, is_ddp, copies = nbytes(towers.trained) / shards, self._is_ddp, 1 + self.devices.is_gpu
        inputs = copies * towers.inputs * pairs / self.chunk
        casts, share = self._is_half * towers.weights / 2, (shards > 1) / (1 + self._sends_half)
        stays: Rows = {
            "weights": (towers.weights / shards, "B", f"4 bytes each / {shards} shards"),
            "moments": (towers.moments / shards, "B", f"state of optim.name={config.optim.name} / {shards} shards"),
            "gradients": (trained * is_ddp, "B", "of DDP's buckets, 4 bytes for each trained weight"),
            "average": (trained * (config.optim.ema is not None), "B", "optim.ema: as the trained weights"),
            "target": (trained * self._has_target, "B", "as the trained weights"),
            "whole weights": (share * towers.whole, "B", "what is in no layer, and two layers, beside the shards"),
            "inputs": (inputs, "B", f"{copies} · {pairs:,} pairs, with the next batch"),
            "state of samples": (self._state, "B", "4 bytes for each number · samples / ranks"),
        }
        chunks = math.ceil(pairs / chunk)
        kept, sizes = min(self._kept, chunks), self._sizes(pairs)
        graphs = kept * max(0.0, towers.graph - casts) * chunk / self.chunk
        if shards == 1 or not self._sends_half:  # else weights are gathered in the type of autocast
            graphs += min(casts, towers.graph)
        forward, backward = ((most - towers.graph) * chunk / self.chunk for most in (towers.forward, towers.backward))
        # fully_shard keeps the buffer of a gathering, from which weights are copied, until it has the next layer's
        forward, backward = (max(most, share * towers.largest) for most in (forward, backward))
        # gradients outside of DDP's buckets: unsharded sums of all chunks but the last, or those of a single process
        unshared = trained if chunks == 1 else trained * shards
        backward += 0.0 if self._gradients_grow or (is_ddp and chunks == 1) else unshared
        backward += 16 * pairs * towers.rows / self.chunk * towers.width
        objective, formula = max(0.0, value_of(self.cost.memory, sizes)), formula_text(self.cost.memory)
        objective += self.cost.kept(pairs, pairs * self.devices.count)
        phases: Rows = {
            "+ towers forward": (graphs + forward, "B", f"graphs of {kept} · {chunk:,} pairs, the largest operation"),
            "+ objective": (graphs + objective, "B", f"graphs + {formula}; D = {towers.width}"),
            "+ towers backward": (graphs + backward, "B", "graphs + gradients + 16·b·D of the embeddings"),
            "+ optimiser": (trained * (not is_ddp), "B", "gradients"),
        }
        return {what: row for what, row in stays.items() if row[0]}, phases

    def peak(self, pairs: int, chunk: int) -> float:
        """Return the most bytes that a rank holds at one time.

        pairs: pairs of the rank in a step. chunk: pairs of a chunk.
        """
        stays, phases = self.memory(pairs, chunk)
        return sum(size for size, *_ in stays.values()) + max(size for size, *_ in phases.values())

    @property
    def fits(self) -> str:
        """The word "fits" if a rank's peak takes at most nine tenths of its device's memory, else "DOES NOT FIT"."""
        return "fits" if self.peak(self.pairs, self.chunk) <= self._usable else "DOES NOT FIT"

    def largest(self) -> Rows:
        """Return rows with the peak memory, whether it fits, and the largest chunk and global batches that fit.

        A largest one is 0 if nothing fits, and at most 2²² (MOST_PAIRS) pairs of a rank.
        """
        b, usable, ranks = self.pairs, self._usable, self.devices.count
        peak, batches = self.peak(b, self.chunk), range(1, MOST_PAIRS + 1)
        fits = f"{self.fits} into {amount_text(self.devices.memory, 'B')}"
        chunk = bisect_right(batches[:b], usable, key=lambda n: self.peak(b, n))
        whole = bisect_right(batches, usable, key=lambda n: self.peak(n, n))
        cut = bisect_right(batches, usable, key=lambda n: self.peak(n, min(n, self.chunk)))
        return {
            "peak": (peak, "B", f"what stays + the largest phase: {fits}, of which a tenth stays free"),
            "largest chunk_size": (chunk, "", f"of {b:,} pairs of a rank"),
            "largest batch in one chunk": (whole * ranks, "", f"{whole:,} pairs of a rank · ranks"),
            f"largest batch in chunks of {self.chunk}": (cut * ranks, "", f"{cut:,} pairs of a rank · ranks"),
        }

    def sent(self) -> Rows:
        """Return rows "KIND, CONTENT" with the bytes of the whole tensors that the collectives of a step send.

        KIND is all-reduce, all-gather or reduce-scatter. Returns {} for a single rank.
        """
        sizes, shards, chunks = self._sizes(self.pairs), self.devices.shards, self.chunks
        halved = ["all-gather"] if self._sends_half else []
        found: Rows = {}
        for kind, formula in self.cost.sent.items():
            if kind in halved and "B·D" in formula:
                formula = {**formula, "B·D": formula["B·D"] / 2}
            found[f"{kind}, objective"] = value_of(formula, sizes), "B", formula_text(formula)
        gradients, filled = nbytes(self.towers.trained, shards), f"rows filled up to {shards} shards"
        if shards > 1:
            passes, (forward, backward, once) = 2 * chunks - 1 + chunks * self._has_target, self.towers.gathered(shards)
            weights = (passes * forward + chunks * backward + once) / (1 + self._sends_half)
            found["all-gather, weights"] = weights, "B", f"{passes} · forward + {chunks} · backward, {filled}"
            found["reduce-scatter, gradients"] = gradients, "B", f"4 bytes for each trained weight, {filled}"
            found["all-reduce, norms"] = 4 * len(self.towers.trained), "B", "4 bytes for each trained tensor"
        if self.devices.count > shards:
            formula = f"4 bytes for each trained weight / {shards} shards"
            found["all-reduce, gradients"] = gradients / shards, "B", formula
        return found

    def time(self) -> Rows:
        """Return rows with the FLOPs of a pair and of a rank in a step, and how long a step and the run take.

        Computing times are arrays (2,), the least and the most, as the MFU is; NaN if the peak of the device is
        unknown.
        """
        towers, b, peak, (mfu, source) = self.towers, self.pairs, self.devices.peak, self._mfu
        forward, backward = towers.forward_flops, towers.backward_flops
        objective = value_of(self.cost.flops, self._sizes(b))
        again, tera = 1 - min(self._kept, self.chunks) / self.chunks, b / 1e12
        rows: Rows = {
            "a step, towers": (tera * (forward + backward), "TFLOP", f"b·(forward + backward), {b:,} pairs"),
            "a step, forward again": (again * tera * forward, "TFLOP", f"b·forward·{again:.3g}: {self.chunks} chunks"),
            "a step, objective": (tera * objective, "TFLOP", f"b·({formula_text(self.cost.flops)})"),
        }
        computed = sum(count for count, *_ in rows.values()) / (mfu[::-1] * peak)
        weights, embeddings = self._seconds_sent()
        seconds = np.maximum(computed, weights) + embeddings
        network = f"links of {self.devices.link:g} GB/s, plan.network={self.devices.network:g}"
        return {
            "a pair, forward": (forward / 1e9, "GFLOP", "both towers; texts of full length"),
            "a pair, backward": (backward / 1e9, "GFLOP", "both towers"),
            **rows,
            "MFU": (mfu, "", source),
            "a step, computing": (computed, "s", f"sum / (MFU · {amount_text(peak, 'TFLOP/s')} of plan.gpu)"),
            "a step, sending weights": (weights, "s", f"and gradients, while towers compute; {network}"),
            "a step, sending the rest": (embeddings, "s", "of the objective and norms, while nothing computes"),
            "a step": (seconds, "s", "the longer of computing and sending weights, and the rest"),
            "steps": (self.steps, "", "steps, or epochs · whole batches of the samples"),
            "the run": (self.steps * seconds / 3600, "h", "steps · seconds of a step"),
        }

    def _seconds_sent(self) -> tuple[float, float]:
        """Return (seconds in which a step sends weights and gradients of the towers, seconds for everything else)."""
        seconds = {True: 0.0, False: 0.0}
        for row, (size, *_) in self.sent().items():
            kind, what = row.split(", ")
            is_shared = what == "weights" or row == "reduce-scatter, gradients"
            ranks = self.devices.shards if is_shared else self.devices.count
            seconds[what in ("weights", "gradients")] += seconds_sent(kind, size, ranks, self.devices)
        return seconds[True], seconds[False]

    def data(self) -> Rows:
        """Return rows on the data: negatives, samples, epochs, and the rate at which the loader must deliver samples.

        For runs with images, images of the first shard are decoded to measure a core, if it can be read.
        """
        config, size = self.config, self.sample_bytes
        decoded, which = samples_per_core(config, self.towers.model, first_shard(config))
        B, k, classes = config.global_batch_size, config.data.negatives.per_row, len(config.run.classes or [])
        of_batch = B * (1 + k) - 1, "", f"B·(1 + {k}) - 1, {k} hard negatives a row"
        if drawn := config.objective.drawn_items(B):
            of_batch = drawn, "", "items drawn for each batch"
        if config.objective.inputs in SCORED and not getattr(config.objective, "contrastive", 0.0):
            of_batch = k, "", f"{k} hard negatives a row; items of other rows are none"
        rows: Rows = {
            "negatives of an anchor": (classes - 1, "", "classes - 1") if classes > 1 else of_batch,
            "samples": (self.samples, "", "weight · bytes of each shard of data.train / bytes of a sample"),
            "bytes of a sample": (size, "", "bytes of the first shard / its samples"),
            "epochs": (self.steps * B / self.samples, "", "steps · B / samples"),
        }
        if p := config.data.negatives.pictures:
            rows["negatives of a text"] = B * (1 + p) - 1, "", f"B·(1 + {p}) - 1, {p} wrong images a row"
        for whose, gpus in (("GPU", 1), ("node", min(self.devices.per_node, self.devices.count))):
            rate = gpus * self.pairs / self.time()["a step"][0][::-1]
            rows[f"pairs/s of a {whose}"] = rate, "", f"{gpus} · b / seconds of a step: the loader must give them"
            if config.has_images:
                formula = f"pairs/s / {decoded:,.0f} samples that a core decodes and crops: {which}"
                rows[f"cores of a {whose}"] = rate / decoded, "", formula
            rows[f"read by a {whose}"] = rate * size / 1e6, "MB/s", "pairs/s · bytes"
        return rows

    def _sizes(self, pairs: int) -> dict[str, float]:
        """Return the products of sizes with which formulas of the objective are evaluated. pairs: pairs of a rank."""
        return products(pairs, self.devices.count, self.towers.width, self.devices.tile)


def first_shard(config: TrainConfig) -> str | None:
    """Return the path of the first shard of data.train if it has an index or can be indexed now, else None.

    It can be indexed if it is local and has at most 1 GiB (LARGEST_SCAN). Returns None also without data.train, for
    data of BEIR, and for data that cannot be used.
    """
    with suppress(UserError, OSError):
        first = next(iter(_weights_of_shards(config)), None)
        if first and (has_index(first) or (not scheme_of(first) and stat(first).size <= LARGEST_SCAN)):
            return first
    return None


def _weights_of_shards(config: TrainConfig) -> dict[str, float]:
    """Return the path of each shard of data.train → its weight; {} without data.train, and for data of BEIR.

    Raises ConfigError for data that cannot be used.
    """
    train = config.data.train
    written = [] if train is None else written_sources(train, "data.train")
    if not written or any(is_beir(source.path) for source in written):
        return {}
    # parse_sources refuses prefixes, which change no number of samples
    plain = [{"path": source.path, "weight": source.weight} for source in written]
    return {path: source.weight for source in parse_sources(plain) for path in source.shards}


def counted_samples(config: TrainConfig) -> tuple[float, float]:
    """Return (samples of an epoch, mean bytes of a sample), by the index of the first shard and the sizes of all.

    If the first shard has no index, one is made and stored. Returns (NaN, NaN) if `first_shard` is None, or a shard
    cannot be read.
    """
    with suppress(UserError, OSError, ZeroDivisionError):
        if first := first_shard(config):
            (index,) = index_shards([first])
            mean = index.size / index.samples
            return sum(weight * stat(path).size for path, weight in _weights_of_shards(config).items()) / mean, mean
    return math.nan, math.nan
