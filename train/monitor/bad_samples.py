"""Count bad samples (samples that cannot be used) over all ranks, and stop the run when there are too many.

data/loading/replacement.py replaces them. Each rank knows those that were replaced in its own batches. The ranks share
them when a step is logged and before a checkpoint, so a run stops at most tracking.every steps late. The limits look
only at the samples' positions in the training order; in each step the batches of auxiliary losses follow the run's own.
So the result depends neither on the number of ranks nor on where the run was stopped and resumed, except in streams,
whose order depends on both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dyad.data.base.errors import DataError
from dyad.data.batch import BadSample, Batch
from dyad.data.config import DataConfig
from dyad.data.loading.order import local_rows
from dyad.data.loading.replacement import examples
from dyad.train.distributed.agreement import raise_on_all
from dyad.train.distributed.world import World, any_rank, gather_objects
from dyad.train.run_folder.ledger import Ledger

WINDOW = 10_000  # samples to which data.bad_share applies
SHOWN = 3  # bad samples that the error message names


class BadSampleCounter:
    """Counts the bad samples of all ranks, and raises DataError when there are more than the configuration allows.

    Call `observe` after each step, and `check` when the ranks shall share what they have observed. sizes: the global
    batch size of each loss, first that of the run's own. ledger: the run's event file, which lists them. log: prints
    which shard of a stream could not be read. Attribute total: all bad samples of the run that the ranks have shared so
    far.
    """

    def __init__(
        self, config: DataConfig, sizes: Sequence[int], world: World, ledger: Ledger, log: Callable[[str], None]
    ) -> None:
        self._config, self._sizes = config, sizes
        self._world, self._ledger, self._log = world, ledger, log
        self._unshared: list[tuple[int, int, BadSample]] = []  # position in the order, step, sample
        self._first: list[BadSample] = []
        self.total, self._in_a_row, self._last = 0, 0, -1
        self._recent: list[int] = []  # positions within the last WINDOW samples

    def observe(self, batch: Batch, step: int) -> None:
        """Remember the bad samples of this rank's batch, and of the batches in its field `auxiliary`.

        step: finished optimiser steps, including this batch's.
        """
        first = (step - 1) * sum(self._sizes)
        for size, own in zip(self._sizes, (batch, *batch.auxiliary), strict=True):
            own_first = first + local_rows(size, self._world.rank, self._world.size).start
            self._unshared += [(own_first + bad.row, step, bad) for bad in own.bad]
            first += size

    def check(self) -> int:
        """Collect all ranks' bad samples since the last call, and write them to ledger.jsonl; return the run's total.

        Raises DataError on rank 0, and an error that is not printed on the others (see raise_on_all), when
        data.bad_in_a_row samples in a row are bad, or a larger share than data.bad_share of the last WINDOW samples.
        Every rank must call it.
        """
        if any_rank(bool(self._unshared), self._world):
            events = [event for rank in gather_objects(self._unshared, self._world) for event in rank]
            self._unshared = []
            raise_on_all(self._world, lambda: self._take(sorted(events, key=lambda event: event[0])))
        return self.total

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and recent positions of bad samples, as a JSON dictionary for a checkpoint.

        Call `check` first: bad samples that the ranks have not shared yet are not in it.
        """
        return {"total": self.total, "row": self._in_a_row, "last": self._last, "recent": self._recent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self._in_a_row, self._last = state["total"], state["row"], state["last"]
        self._recent = list(state["recent"])

    def _take(self, events: list[tuple[int, int, BadSample]]) -> None:
        """Write bad samples to the ledger (the run's event file), then count each one.

        Also logs each shard of a stream that could not be read. Raises DataError if there are more bad samples than the
        configuration allows. events: (position in the training order, step, sample), sorted by position.
        """
        for _, step, bad in events:  # all of them before a limit may stop the run
            facts = {"id": bad.id, "shard": bad.shard, "key": bad.key, "reason": bad.reason, "by": bad.replaced_by}
            self._ledger.write(step, "substitute", **facts)
            if not bad.key:
                self._log(f"step {step}: {bad.reason}")
        for position, step, bad in events:
            self._count(position, step, bad)

    def _count(self, position: int, step: int, bad: BadSample) -> None:
        """Count one bad sample. Raises DataError at a limit, data.bad_in_a_row or data.bad_share, as `check` says.

        position: place in the training order; a replacement that is bad itself counts at the place of the sample that
        it replaces. step: finished optimiser steps, for the message.
        """
        self.total += 1
        self._in_a_row = self._in_a_row + 1 if position <= self._last + 1 else 1
        self._last = position
        self._recent = [*(other for other in self._recent if other > position - WINDOW), position]
        self._first = [*self._first, bad][:SHOWN]
        most, share = self._config.bad_in_a_row, self._config.bad_share
        if self._in_a_row >= most:
            what, limit = f"{self._in_a_row} samples in a row", f"data.bad_in_a_row={most}"
        elif len(self._recent) > share * WINDOW:
            what = f"{len(self._recent)} of the last {min(position + 1, WINDOW):,} samples"
            limit = f"data.bad_share={share} ({int(share * WINDOW):,} of {WINDOW:,})"
        else:
            return
        raise DataError(
            f"step {step}: {what} cannot be used, {limit} is the limit; {self.total} in all, listed in "
            f"{self._ledger.path}. {examples(self._first)}\n"
            "Repair the shards (python -m data check SHARD), or raise the limit: the same command goes on"
        )
