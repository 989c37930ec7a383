"""RunSchedule: at which optimiser steps a run starts, ends, logs, evaluates and saves checkpoints."""

import math
from dataclasses import dataclass

from dyad.train.config import TrainConfig


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Return a run's number of optimiser steps: config.steps, or else config.epochs · steps_per_epoch, rounded up.

    If neither is set, it is 0.
    """
    return config.steps or math.ceil((config.epochs or 0) * steps_per_epoch)


@dataclass(frozen=True)
class RunSchedule:
    """The first and last step of a run, and how often it logs, evaluates and saves checkpoints, in optimiser steps.

    first_step: finished steps at the start; total_steps: finished steps at the end. evaluate_every=0 means "at the end
    only", None "never". evaluation_owed: whether an earlier start stopped before the evaluation that was due at
    first_step. steps_per_epoch: optimiser steps of one pass over the data; only logged.
    """

    first_step: int
    total_steps: int
    global_batch_size: int
    world_size: int
    log_every: int
    evaluate_every: int | None
    save_every: int
    evaluation_owed: bool = False
    steps_per_epoch: int = 1

    def due(self, step: int, every: int | None) -> bool:
        """Whether an action is due after `step` finished steps: at each multiple of its interval, and at the last.

        every: the action's interval in steps; 0: at the last step only; None: never.
        """
        return every is not None and (step == self.total_steps or (every > 0 and step % every == 0))

    def logs(self, step: int) -> bool:
        """Whether metrics are logged after `step` finished steps: after step 1, the last, and every `log_every`."""
        return step == 1 or self.due(step, self.log_every)

    def next_save(self, step: int) -> int:
        """Return when the next checkpoint is due, in finished steps, if `step` steps are finished now.

        It is the next multiple of save_every, or total_steps if that is earlier.
        """
        return min((step // self.save_every + 1) * self.save_every, self.total_steps)
