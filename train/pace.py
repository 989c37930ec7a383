"""Who is slow: what each rank needs for a step by itself, without waiting for others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import median
from time import perf_counter

import torch

from data.batch import Batch
from train.distributed.world import World, all_reduce_sum
from train.loop import timed

SPAN = 5.0  # seconds of work by itself after which the slowest rank is judged: in less, it may be chance


class Alone:
    """Seconds between begins() and ends(), of all steps since the last reading. On a GPU by events: nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds, self._start = 0.0, 0.0

    def begins(self) -> None:
        if self._on_gpu:
            self._spans.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self._spans[-1][0].record()
        self._start = perf_counter()

    def ends(self) -> None:
        if self._on_gpu:
            self._spans[-1][1].record()
        else:
            self._seconds += perf_counter() - self._start

    def read(self) -> float:
        """Call after a step: its scalars were read, so the device has passed the events."""
        seconds = self._seconds + sum(begin.elapsed_time(end) for begin, end in self._spans) / 1000
        self._spans, self._seconds = [], 0.0
        return seconds


class Pace:
    """Warns of a rank whose pace is below `share` of the others' (their median), once until it is well again.

    A rank's pace is 1 / (seconds it waits for data + seconds from there to where it first waits for other ranks).
    """

    def __init__(self, alone: Alone, share: float, world: World, warn: Callable[[str], None]) -> None:
        self._alone, self._share, self._world, self._warn = alone, share, world, warn
        self._warm, self._slow = False, set[int]()
        self._begin_anew()

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches. The first does not count: it waits until everything has started."""
        for batch, waited in timed(batches):
            self._steps, self._waited = self._steps + 1, self._waited + waited
            yield batch
            if not self._warm:
                self._warm = True
                self._begin_anew()

    def judge(self) -> None:
        """Call on every rank, now and then, after a step. A collective, of two numbers per rank."""
        if self._world.size == 1 or not self._warm:
            return
        self._computed += self._alone.read()
        seconds_W2 = torch.zeros(self._world.size, 2, dtype=torch.float64, device=self._world.device)
        seconds_W2[self._world.rank] = torch.tensor([self._waited, self._computed])
        needed = [(sum(row), row[0]) for row in all_reduce_sum(seconds_W2, self._world).tolist()]
        if max(needed)[0] < SPAN:
            return
        slow = set()
        for rank, (own, waited) in enumerate(needed):
            others = median(total for other, (total, _) in enumerate(needed) if other != rank)
            if others < self._share * own:
                slow.add(rank)
                if rank not in self._slow:
                    self._warn(self._words(rank, own, waited, others))
        self._slow = slow
        self._begin_anew()

    def _words(self, rank: int, own: float, waited: float, others: float) -> str:
        doing = "waiting for data" if waited > own - waited else "computing"
        return (
            f"warning: rank {rank} of {self._world.size} has {others / own:.2f} of the others' pace (dist.slow_rank="
            f"{self._share:g}): it needs {own / self._steps:.3f} s a step by itself, most of it {doing}, they "
            f"{others / self._steps:.3f} s"
        )

    def _begin_anew(self) -> None:
        self._steps, self._waited, self._computed = 0, 0.0, 0.0
        self._alone.read()
