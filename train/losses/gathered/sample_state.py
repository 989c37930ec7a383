"""Per-sample state of objectives: k floats for every training sample, stored on the rank that owns the sample.

Legend: n samples, k floats for each, W ranks; in a step b samples on this rank, B on all ranks, U of these distinct.

Rank ⌊i / ⌈n/W⌉⌋ owns sample i, so a rank stores k·n/W floats. A step sends the B ids and makes one all-reduce of k·B
floats, for any n. The state is neither parameter nor buffer: data parallelism would overwrite these with the values of
rank 0. It is the extra state of a torch module, so that state_dict() of an objective has the part of this rank.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError, HardwareError
from dyad.train.losses.sums.all_gather import Layout
from dyad.train.losses.sums.conditions import holds

BLOCK = 1 << 20  # samples written or sent at a time
COUNTERS = ("samples_seen", "never_visited")  # what a checkpoint has beside the floats of each sample


@dataclass(frozen=True)
class StateRead:
    """The samples of one global batch, in the order of ranks, and their per-sample state before this step.

    ids_B: sample ids, int64. old: name of a state (such as a running mean) → (B,) floats, NaN where a sample has none
    yet. first_B: bool, True at the first place of each distinct id. inverse_B, counts_U: None if all ids differ, else
    the index of each of the B ids among the U distinct ids, and how often each distinct id occurs.
    """

    ids_B: Tensor
    old: dict[str, Tensor]
    first_B: Tensor
    inverse_B: Tensor | None = None
    counts_U: Tensor | None = None

    @property
    def repeated(self) -> bool:
        """Whether a sample id occurs more than once in the batch."""
        return self.counts_U is not None

    def with_old(self, old_kB: Tensor) -> StateRead:
        """Return a copy whose `old` has the values of old_kB (k, B): row i for the i-th of its k names."""
        return replace(self, old=dict(zip(self.old, old_kB.unbind(), strict=True)))

    def mean(self, values_B: Tensor) -> Tensor:
        """Return, for each element of values_B, the mean of all elements of the same sample in the global batch, (B,).

        values_B: (B,), in the order of ids_B. A sample may occur more than once in a batch. The result does not depend
        on the order of the batch, not even in its last bit.
        """
        return self._reduced(values_B, "mean") if self.repeated else values_B

    def log_mean(self, log_values_B: Tensor) -> Tensor:
        """Return, for each element, log(mean(exp)) of all elements of the same sample in the global batch, (B,).

        log_values_B: (B,), in the order of ids_B; the result is −inf where all elements of a sample are.
        """
        if not self.repeated:
            return log_values_B
        highest_B = self._reduced(log_values_B, "max")
        highest_B.masked_fill_(highest_B == -math.inf, 0.0)  # −inf − (−inf) is not a number
        return highest_B + self.mean((log_values_B - highest_B).exp()).log()

    def _reduced(self, values_B: Tensor, how: str) -> Tensor:
        """Return, for each element, the mean or maximum (how: "mean" or "max") of all elements of its sample, (B,)."""
        assert self.inverse_B is not None
        order_B = values_B.argsort()
        # by sample, then by value: the order of summation does not depend on the order of the batch
        order_B = order_B[self.inverse_B[order_B].argsort(stable=True)]
        return torch.segment_reduce(values_B[order_B], how, lengths=self.counts_U)[self.inverse_B]


class SampleState(nn.Module):
    """Named floats (such as a running mean) for every sample id 0 … n−1, stored on the rank that owns the sample.

    num_samples: n. initial: name → the float of a sample before its first batch, NaN for none. Floats are stored as
    float32, and as float64 once they have been read or loaded as float64. This rank's share lies on the device of the
    ids that are read. If it exceeds memory_budget_mb (MiB), it lies in a memory-mapped scratch file in the temporary
    folder (TMPDIR), which is deleted when the process ends; a GPU then waits for it in every step.
    """

    def __init__(self, num_samples: int, initial: Mapping[str, float], memory_budget_mb: int = 4096) -> None:
        super().__init__()
        assert num_samples > 0 and initial and not set(initial) & set(COUNTERS)
        self.num_samples, self.names = num_samples, tuple(initial)
        self.samples_seen = 0  # rows of all global batches so far
        self._initial_k = torch.tensor(list(initial.values()), dtype=torch.float64)
        self._never_visited = torch.tensor(num_samples if self._initial_k.isnan().any() else 0)
        self._budget = memory_budget_mb << 20
        self._table: Tensor | None = None  # (n/W + 1, k) of own samples; the last row takes what others own
        self._undo: tuple[Tensor, Tensor, int, Tensor] | None = None

    @property
    def share_never_visited(self) -> Tensor:
        """The share of all samples of which a state is NaN (none yet), from 0 to 1: 0-d float64, on the table's device.

        It is 0 if every state has an initial value.
        """
        return self._never_visited.double() / self.num_samples

    @property
    def nbytes(self) -> int:
        """Bytes of the state of all n samples in a checkpoint, without its counters."""
        return self.num_samples * len(self.names) * (4 if self._table is None else self._table.element_size())

    def read(
        self,
        sample_ids_b: Tensor | None,
        layout: Layout,
        dtype: torch.dtype = torch.float32,
        ids_B: Tensor | None = None,
        summed: bool = True,
    ) -> StateRead:
        """Return the stored state of each sample of the global batch, on every rank. Every rank must call it.

        The state is one float per name, such as a running mean. sample_ids_b: the sample ids of this rank, int64.
        layout: how the batch is distributed over ranks. dtype: the type of the floats returned. ids_B: the sample ids
        of all ranks, if the caller has gathered them; None: they are gathered here. summed=False: `old` of the result
        is this rank's share, which the caller sums over ranks and sets by StateRead.with_old. Raises ConfigError
        without ids and, on all ranks, for ids outside 0 … n−1, unless collect_checks(speculative=True) of
        sums/conditions.py assumes that there are none; ValueError for a wrong number of ids; HardwareError if a scratch
        file cannot be written.
        """
        if sample_ids_b is None:
            raise ConfigError("this objective keeps state for every sample: give it sample_ids")
        if len(sample_ids_b) != layout.sizes[layout.rank]:
            raise ValueError(f"{len(sample_ids_b)} sample_ids for {layout.sizes[layout.rank]} rows")
        self._undo = None  # undo restores what is written after this read only
        ids_B = layout.gather(sample_ids_b) if ids_B is None else ids_B
        if not holds(((ids_B >= 0) & (ids_B < self.num_samples)).all()):
            outside = ids_B[(ids_B < 0) | (ids_B >= self.num_samples)]
            raise ConfigError(
                f"sample id {outside[0]} is none of the {self.num_samples:,} samples 0 … {self.num_samples - 1} that "
                "have state: set objective.num_samples to the number of samples in the manifest (null: as many as the "
                "training data has)"
            )
        table, row_B = self._rows(ids_B, dtype)
        owned_kB = torch.where(row_B < len(table) - 1, table[row_B].T.to(dtype), 0.0).contiguous()
        old_kB = owned_kB.to(ids_B.device)  # each column is zero on all ranks but the owner
        old_kB = layout.sum_(old_kB) if summed else old_kB
        old = dict(zip(self.names, old_kB.unbind(), strict=True))
        sorted_B, order_B = ids_B.sort(stable=True)
        begins_B = torch.cat([sorted_B.new_ones(min(len(ids_B), 1)), sorted_B.diff()]) > 0
        first_B = torch.empty_like(begins_B).scatter_(0, order_B, begins_B)
        if holds(first_B.all()):
            return StateRead(ids_B, old, first_B)
        return StateRead(ids_B, old, first_B, *ids_B.unique(return_inverse=True, return_counts=True)[1:])

    def write(self, read: StateRead, new: Mapping[str, Tensor]) -> None:
        """Store new state for the samples of the global batch `read`, the result of the method `read`.

        new: name of a state → (B,). Entries with equal sample ids must be equal, which is asserted: average them with
        StateRead.mean first. Names that `new` lacks, and numbers that are not finite, keep their state. The rows of the
        batch are added to samples_seen. Until the next `read`, `undo` can take the write back. Every rank must call it,
        with the same arguments: it stores those samples that it owns.
        """
        old_kB, new_kB = (
            torch.stack(columns).detach()
            for columns in (list(read.old.values()), [new.get(name, read.old[name]) for name in self.names])
        )
        new_kB = torch.where(new_kB.isfinite(), new_kB, old_kB)  # others would stay for ever
        if read.repeated:
            assert read.inverse_B is not None
            one_of_kB = torch.empty_like(new_kB).index_copy_(1, read.inverse_B, new_kB)[:, read.inverse_B]
            same = torch.allclose(new_kB, one_of_kB, rtol=0, atol=0, equal_nan=True)
            assert same, "the new numbers of one sample differ: average them with StateRead.mean"
        table, row_B = self._rows(read.ids_B, new_kB.dtype)
        self._undo = (row_B, table[row_B], self.samples_seen, self._never_visited)
        table[row_B] = new_kB.T.to(table)
        self.samples_seen += len(read.ids_B)
        lacked_B, lacks_B = (numbers_kB.isnan().any(0).long() for numbers_kB in (old_kB, new_kB))
        self._never_visited = self._never_visited + ((lacks_B - lacked_B) * read.first_B).sum().to(table.device)

    def undo(self) -> None:
        """Restore, bit for bit, the per-sample state and samples_seen as they were before the last `write`.

        Does nothing if nothing was written since the last `read`, `load` or `undo`.
        """
        if self._undo is not None and self._table is not None:
            row, before, self.samples_seen, self._never_visited = self._undo
            self._table[row] = before
            self._undo = None

    def gathered(self, device: torch.device) -> dict[str, Tensor]:
        """Return on rank 0 the state of all n samples, to be saved, and {} on other ranks. Every rank must call it.

        The result is a dict: the name of a state → (n,) float32 or float64, and the counters samples_seen and
        never_visited (samples without state yet), 0-d int64, all on the CPU. device: the device from which the process
        group sends. Blocks are sent one by one, so only rank 0 holds all samples.
        """
        rank, world_size = _rank_and_world()
        table = self._table_in(torch.float32)
        samples = self.num_samples if rank == 0 else 0
        whole = {name: torch.empty(samples, dtype=table.dtype) for name in self.names}  # on the CPU
        owned = [self._own(owner, world_size) for owner in range(world_size)]
        each = math.ceil(BLOCK / world_size)  # samples of one rank in a block
        for first in range(0, math.ceil(self.num_samples / world_size), each):
            starts = [min(own.start + first, own.stop) for own in owned]
            sizes = [min(each, own.stop - start) for own, start in zip(owned, starts, strict=True)]
            block = Layout(tuple(sizes), rank).gather(table[first : min(first + each, len(table) - 1)].to(device)).cpu()
            for start, part in zip(starts, block.split(sizes), strict=True) if rank == 0 else ():
                for name, column in zip(self.names, part.unbind(1), strict=True):
                    whole[name][start : start + len(part)] = column
        counters = {"samples_seen": self.samples_seen, "never_visited": int(self._never_visited)}
        whole |= {name: torch.tensor(value) for name, value in counters.items()}
        return whole if rank == 0 else {}

    def load(self, whole: Mapping[str, Tensor], more_samples: bool = False) -> None:
        """Load the state of this rank's samples from `whole`, the result of `gathered` at any number of ranks.

        Every rank must call it, with the same `whole`. more_samples: whether `whole` may have fewer samples than this
        object; the others take their initial state. Raises ConfigError, with nothing changed, if `whole` is of another
        objective or number of samples, or its shapes contradict each other, and HardwareError if a scratch file cannot
        be written. `undo` does nothing until the next write.
        """
        if set(whole) != {*self.names, *COUNTERS}:
            there, here = (", ".join(sorted(set(names) - set(COUNTERS))) or "nothing" for names in (whole, self.names))
            raise ConfigError(f"the checkpoint has per-sample state of another objective: {there}, not {here}")
        shapes = {name: tuple(whole[name].shape) for name in self.names}
        samples = max((*next(iter(shapes.values())), 0))
        if {*shapes.values()} != {(samples,)} or any(whole[name].numel() != 1 for name in COUNTERS):
            raise ConfigError(f"the checkpoint has per-sample state of shapes that contradict each other: {shapes}")
        if samples > self.num_samples or (samples < self.num_samples and not more_samples):
            raise ConfigError(
                f"the checkpoint has per-sample state of {samples:,} samples, but objective.num_samples is "
                f"{self.num_samples:,}: use the same training data, or start another run.name with init_from"
            )
        own = self._own(*_rank_and_world())
        table = self._table_in(whole[self.names[0]].dtype)
        for column, name in enumerate(self.names):
            saved = whole[name][own]
            table[: len(saved), column] = saved
            table[len(saved) :, column] = self._initial_k[column]
        self.samples_seen, never_visited = (int(whole[name]) for name in COUNTERS)
        never_visited += (self.num_samples - samples) * bool(self._initial_k.isnan().any())
        self._never_visited = torch.tensor(never_visited, device=table.device)
        self._undo = None

    def get_extra_state(self) -> dict[str, Any]:
        """Return what state_dict has of this object: the state of the samples that this rank owns, not copied.

        The result is a dict: table, (n/W, k) floats, None before the first batch or `load`; the counters; and part,
        (names, rank, number of ranks, number of samples). No rank waits for another.
        """
        counters = {"samples_seen": self.samples_seen, "never_visited": self._never_visited}
        table = None if self._table is None else self._table[:-1]
        return {"table": table, **counters, "part": (self.names, *_rank_and_world(), self.num_samples)}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Load what `get_extra_state` returned on this rank; load_state_dict calls it.

        Raises ConfigError, with nothing changed, for the state of another objective or rank, or of other numbers of
        ranks or samples.
        """
        there, here = state["part"], (self.names, *_rank_and_world(), self.num_samples)
        if there != here:
            of_there, of_here = (f"{', '.join(n)} of {s:,} samples, rank {r} of {w}" for n, r, w, s in (there, here))
            raise ConfigError(
                f"the state_dict has per-sample state {of_there}, and this objective {of_here}: each rank saves and "
                "loads its own. For another number of ranks use sample_state.gathered(device) and sample_state.load"
            )
        if (saved := state["table"]) is None:
            self._table = None
        else:
            self._table_in(saved.dtype)[:-1] = saved
        self.samples_seen, self._undo = state["samples_seen"], None
        self._never_visited = state["never_visited"].to(self._never_visited.device)

    def _own(self, rank: int, world_size: int) -> slice:
        """Return the slice of the sample ids 0 … n−1 whose state the rank `rank` stores."""
        each, n = math.ceil(self.num_samples / world_size), self.num_samples
        return slice(min(rank * each, n), min((rank + 1) * each, n))

    def _rows(self, ids_B: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the table of this rank's samples and the row in it of each sample of ids_B, (B,) int64 on its device.

        A sample that another rank owns gets the last row, which no sample of this rank has. dtype: the table is made in
        it, or converted if it is wider than the table's own type; a wider table keeps its type. The table is moved to
        the device of ids_B if it is within the memory budget (`_table_in`).
        """
        table, own = self._table_in(dtype, ids_B.device), self._own(*_rank_and_world())
        row_B = torch.where((ids_B >= own.start) & (ids_B < own.stop), ids_B - own.start, own.stop - own.start)
        return table, row_B.to(table.device)

    def _table_in(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Return the table of k floats for each of this rank's samples, (n/W + 1, k) for n samples and W ranks.

        The first call makes the table. If `dtype` is wider than the type of the table, the table is converted. device:
        the device to which the table is moved, unless it exceeds the memory budget and so stays on the CPU; None: it is
        not moved.
        """
        before, own = self._table, self._own(*_rank_and_world())
        if before is None:
            self._table = _new_table(own.stop - own.start + 1, self._initial_k.to(dtype), self._budget)
        elif torch.promote_types(before.dtype, dtype) != before.dtype:
            self._table = _new_table(len(before), self._initial_k.to(dtype), self._budget).copy_(before)
        assert self._table is not None
        if device is not None and self._table.nbytes <= self._budget:
            self._table, self._never_visited = self._table.to(device), self._never_visited.to(device)
        return self._table


def _rank_and_world() -> tuple[int, int]:
    """Return the index of this rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _new_table(rows: int, initial_k: Tensor, budget: int) -> Tensor:
    """Make a (rows, k) table whose rows all equal `initial_k`, in memory, or in a scratch file if over `budget` bytes.

    The file is written, not only extended, so that a full disk raises HardwareError here and does not crash the process
    later.
    """
    size = rows * initial_k.nbytes
    if size <= budget:
        return initial_k.repeat(rows, 1)
    block = initial_k.repeat(min(rows, BLOCK), 1).numpy()
    try:
        with tempfile.TemporaryFile() as file:
            for first in range(0, rows, BLOCK):
                file.write(block[: rows - first].data)
            file.flush()
            return torch.from_numpy(np.memmap(file, dtype=block.dtype, mode="r+", shape=(rows, len(initial_k))))
    except OSError as error:
        raise HardwareError(
            f"cannot keep {size:,} bytes of per-sample state in {tempfile.gettempdir()}: {error.strerror}. Set "
            "TMPDIR to a folder with room, or raise objective.memory_budget_mb"
        ) from error
