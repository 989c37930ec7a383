"""How many samples were substituted, over all ranks, and when that is too many.

Each rank knows what it replaced. When a step is logged and before a checkpoint they tell each other: so a run stops at
most tracking.every steps late, and a ceiling is judged by the places of samples in the order alone, the same whatever
the number of ranks and wherever the run was stopped between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from data.batch import BadSample, Batch
from data.config import DataConfig
from data.errors import DataError
from data.substitutes import examples
from train.distributed.agreement import agreed
from train.distributed.world import World, any_rank, gather_objects
from train.runs.ledger import Ledger

WINDOW = 10_000  # samples
SHOWN = 3


class Substituted:
    """total: bad samples so far, by what was last told. say: hears of a shard of a stream that could not be read."""

    def __init__(
        self, config: DataConfig, global_batch_size: int, world: World, ledger: Ledger, say: Callable[[str], None]
    ) -> None:
        self._in_a_row, self._share = config.bad_in_a_row, config.bad_share
        self._global_batch_size, self._world, self._ledger, self._say = global_batch_size, world, ledger, say
        self._untold: list[tuple[int, int, BadSample]] = []  # place in the order, step, sample
        self._first: list[BadSample] = []
        self.total, self._row, self._last = 0, 0, -1
        self._recent: list[int] = []

    def batches(self, first_step: int, batches: Iterable[Batch]) -> Iterator[Batch]:
        size, world = self._global_batch_size, self._world
        for index, batch in enumerate(batches, first_step):
            first = index * size + world.rank * size // world.size
            self._untold += [(first + bad.row, index + 1, bad) for bad in batch.bad]
            yield batch

    def tell(self) -> Mapping[str, float]:
        """Write what happened since the last time into the ledger; the total, to be logged. A collective.

        Raises DataError, on all ranks, when a ceiling of the configuration is reached.
        """
        if any_rank(bool(self._untold), self._world):
            told = [event for rank in gather_objects(self._untold, self._world) for event in rank]
            self._untold = []
            agreed(self._world, lambda: self._take(sorted(told, key=lambda event: event[0])))
        return {"substituted": float(self.total)}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: JSON."""
        return {"total": self.total, "row": self._row, "last": self._last, "recent": self._recent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self._row, self._last = state["total"], state["row"], state["last"]
        self._recent = list(state["recent"])

    def _take(self, events: list[tuple[int, int, BadSample]]) -> None:
        for _, step, bad in events:
            facts = {"id": bad.id, "shard": bad.shard, "key": bad.key, "reason": bad.reason, "by": bad.replaced_by}
            self._ledger.note(step, "substitute", **facts)
            if not bad.key:
                self._say(f"step {step}: {bad.reason}")
        for place, step, bad in events:
            self._count(place, step, bad)

    def _count(self, place: int, step: int, bad: BadSample) -> None:
        """One more. A substitute that is bad itself counts at the place of the first one."""
        self.total += 1
        self._row = self._row + 1 if place <= self._last + 1 else 1
        self._last = place
        self._recent = [*(other for other in self._recent if other > place - WINDOW), place]
        if len(self._first) < SHOWN:
            self._first.append(bad)
        if self._row >= self._in_a_row:
            self._stop(step, f"{self._row} samples in a row", f"data.bad_in_a_row={self._in_a_row}")
        if len(self._recent) > self._share * WINDOW:
            self._stop(step, f"{len(self._recent)} of the last {WINDOW:,} samples", f"data.bad_share={self._share}")

    def _stop(self, step: int, what: str, limit: str) -> None:
        raise DataError(
            f"step {step}: {what} cannot be used, {limit} is the limit; {self.total} in all, listed in "
            f"{self._ledger.path}. {examples(self._first)}\n"
            "Repair the shards (python -m data check SHARD), or raise the limit: the same command goes on"
        )
