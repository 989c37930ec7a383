"""`python -m train` without what faults.lean takes from it.

With $IDS it notes the samples of every step, as {"step", "world", "ids"} in $IDS/<start>-<rank>.jsonl. With $STOP, as
SIGNAL@STEP, it sends itself that signal before that step; steps count from 1 as in metrics.jsonl.
"""

import json
import os
import runpy
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faults import lean  # noqa: F401

from dyad.data.batch import Batch
from dyad.train.step.step import TrainStep

take = TrainStep.__call__
name, _, last = os.environ.get("STOP", "").partition("@")


def observed(self: TrainStep, batch: Batch, step: int, **how: Any) -> Mapping[str, float]:
    if "IDS" in os.environ:
        line = {"step": step, "world": self.world.size, "ids": batch.sample_ids.tolist()}
        path = Path(os.environ["IDS"]) / f"{os.environ['MASTER_PORT']}-{os.environ['RANK']}.jsonl"
        with path.open("a") as notes:
            print(json.dumps(line), file=notes)
    if last == str(step + 1):
        os.kill(os.getpid(), signal.Signals[name])
    return take(self, batch, step, **how)


TrainStep.__call__ = observed  # type: ignore[method-assign]
runpy.run_module("train", run_name="__main__", alter_sys=True)
