"""Find stragglers: ranks that need more time for a step than the others, not counting time spent waiting for others."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from dyad.train.distributed.world import World, all_reduce_sum

SPAN = 5.0  # seconds of own time of the slowest rank before ranks are compared: differences of less may be chance


class LocalTimer:
    """Measures the seconds between start() and stop(), summed over steps until `read`.

    Each start() must be followed by a stop(); a further stop() does nothing. On a GPU both record CUDA events on the
    current stream, so the host does not wait for the GPU, and the seconds are those of the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds, self._start, self._running = 0.0, 0.0, False

    def start(self) -> None:
        if self._on_gpu:
            self._events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self._events[-1][0].record()
        self._start, self._running = perf_counter(), True

    def stop(self) -> None:
        if self._running and self._on_gpu:
            self._events[-1][1].record()
        elif self._running:
            self._seconds += perf_counter() - self._start
        self._running = False

    def read(self) -> float:
        """Return the seconds between start() and stop(), summed since the last call of `read`; start again from zero.

        On a GPU the time is measured with CUDA events. Those that the GPU has not completed yet count in the next call.
        """
        waiting = [(start, stop) for start, stop in self._events if not stop.query()]
        done = self._events[: len(self._events) - len(waiting)]  # the GPU completes them in order
        seconds = self._seconds + sum(start.elapsed_time(stop) for start, stop in done) / 1000
        self._events, self._seconds = waiting, 0.0
        return seconds


class Stragglers:
    """Warns, by a line to `log`, of a rank whose pace is below `share` times the pace of the other ranks.

    A rank's pace is the inverse of its own time for a step: the wait for its batch, plus the computation until it waits
    for other ranks. That of the others is the inverse of their median time. `timer`, which the caller starts and stops
    in each step, measures this computation. share: the key dist.slow_rank; 0: no warnings. A rank that stays slow is
    named once, not at every check.
    """

    def __init__(self, timer: LocalTimer, share: float, world: World, log: Callable[[str], None]) -> None:
        self._timer, self._share, self._world, self._log = timer, share, world, log
        self._started, self._slow = False, set[int]()
        self._reset()

    def observe(self, waited: float) -> None:
        """Count one step of this rank, which waited `waited` seconds for its batch; call it after every step.

        The first step is left out, because it also waits for the start of the loader and the towers.
        """
        if self._started:
            self._steps, self._waited = self._steps + 1, self._waited + waited
        else:  # the first step does not count: it waits until loader and towers are ready
            self._started = True
            self._reset()

    def check(self) -> None:
        """Compare the times of all ranks since the last comparison, and warn of slow ranks; call it after a step.

        Does nothing until the slowest rank has spent SPAN seconds on waiting for batches and computing, not counting
        its wait for other ranks. Every rank must call it, because the ranks exchange these times by an all-reduce.
        """
        if self._world.size == 1 or not self._steps:
            return
        self._computed += self._timer.read()
        seconds_W2 = torch.zeros(self._world.size, 2, dtype=torch.float64)
        seconds_W2[self._world.rank] = torch.tensor([self._waited, self._computed])
        needed = [(sum(row), row[0]) for row in all_reduce_sum(seconds_W2, self._world).tolist()]
        if max(needed)[0] < SPAN:
            return
        slow, ordered = set(), sorted(total for total, _ in needed)
        for rank, (own, waited) in enumerate(needed):
            others = median_without(own, ordered)
            if others < self._share * own:
                slow.add(rank)
                if rank not in self._slow:
                    doing = "waiting for data" if waited > own - waited else "computing"
                    self._log(
                        f"warning: rank {rank} of {self._world.size} has {others / own:.2f} of the others' pace "
                        f"(dist.slow_rank={self._share:g}): it needs {own / self._steps:.3f} s a step by itself, most "
                        f"of it {doing}, they {others / self._steps:.3f} s"
                    )
        self._slow = slow
        self._reset()

    def _reset(self) -> None:
        self._steps, self._waited, self._computed = 0, 0.0, 0.0
        self._timer.read()


def median_without(value: float, ordered: Sequence[float]) -> float:
    """Return the median of the numbers `ordered` (ascending, two or more) without `value`, which is one of them."""
    left_out, count = bisect_left(ordered, value), len(ordered) - 1
    low, high = (ordered[i + (i >= left_out)] for i in ((count - 1) // 2, count // 2))
    return (low + high) / 2
