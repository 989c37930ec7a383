"""`python -m train` that notes the samples of every step, as {"step", "world", "ids"} in $IDS/<start>-<rank>.jsonl."""

import json
import os
import runpy
from collections.abc import Mapping
from pathlib import Path

from dyad.data.batch import Batch
from dyad.train.step.step import TrainStep

take = TrainStep.__call__
notes = (Path(os.environ["IDS"]) / f"{os.environ['MASTER_PORT']}-{os.environ['RANK']}.jsonl").open("a")


def noted(self: TrainStep, batch: Batch, step: int) -> Mapping[str, float]:
    line = {"step": step, "world": self.world.size, "ids": batch.sample_ids.tolist()}
    print(json.dumps(line), file=notes, flush=True)
    return take(self, batch, step)


TrainStep.__call__ = noted  # type: ignore[method-assign]
runpy.run_module("train", run_name="__main__", alter_sys=True)
