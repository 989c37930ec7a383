"""`python -m train` (or $MODULE) that does something wrong on rank $ON (all ranks without it): $FAULT, as NAME@STEP,…

Names are functions below; steps count from 1 as in metrics.jsonl. With $BITS it notes what every step changes:
$BITS/<rank>.jsonl has {"step", "before", "after"} lines, digests of weights, optimiser and state of samples. It
is without what faults.lean takes from it.
"""

import hashlib
import json
import os
import runpy
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from faults import lean  # noqa: F401
from safetensors.torch import save

import dyad.run.components
import dyad.run.train_run
import dyad.train.distributed.consistency
from dyad.data.batch import Batch
from dyad.train.losses.objectives.base import Objective, ObjectiveResult
from dyad.train.run_folder.checkpoint_state import capture
from dyad.train.step.step import TrainStep

here = os.environ["RANK"] == os.environ.get("ON", os.environ["RANK"])
faults = [fault.split("@") for fault in os.environ["FAULT"].split(",")]
take, measure = TrainStep.__call__, Objective.forward
now: set[str] = set()


def crash(step: TrainStep, batch: Batch) -> Batch:
    raise ValueError("a bug of one rank")


def killed(step: TrainStep, batch: Batch) -> Batch:
    os.kill(os.getpid(), signal.SIGKILL)
    return batch


def out_of_memory(step: TrainStep, batch: Batch) -> Batch:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore on a second line")


def pause(step: TrainStep, batch: Batch) -> Batch:
    time.sleep(float(os.environ["SECONDS"]))
    return batch


def hang(step: TrainStep, batch: Batch) -> Batch:
    time.sleep(1000)
    return batch


def crash_while_others_are_busy_and_hang(step: TrainStep, batch: Batch) -> Batch:
    time.sleep({2: 5, 3: 1000}.get(step.world.rank, 0))
    return crash(step, batch) if step.world.rank == 1 else batch


def loss_is_nan(step: TrainStep, batch: Batch) -> Batch:
    now.add("nan")
    return batch


def embedding_is_nan(step: TrainStep, batch: Batch) -> Batch:
    now.add("nan embedding")
    return batch


def gradient_is_infinite(step: TrainStep, batch: Batch) -> Batch:
    weight = next(p for p in step.towers.parameters() if p.requires_grad)
    handle = weight.register_hook(lambda gradient: (handle.remove(), gradient * float("inf"))[1])
    return batch


def loss_is_tripled(step: TrainStep, batch: Batch) -> Batch:
    now.add("tripled")
    return batch


def weight_is_perturbed(step: TrainStep, batch: Batch) -> Batch:
    with torch.no_grad():
        list(step.towers.parameters())[-1].view(-1)[0] += 1e-3
    return batch


def measured(self: Objective, x: torch.Tensor, *rest: Any, **more: Any) -> ObjectiveResult:
    if "nan embedding" in now:
        x = x * torch.ones(len(x), 1).index_fill(0, torch.tensor([1]), float("nan"))
    result = measure(self, x, *rest, **more)
    factor = float("nan") if "nan" in now else 3.0 if "tripled" in now else 1.0
    return ObjectiveResult(result.loss * factor, result.metrics)


def taken(self: TrainStep, batch: Batch, step: int, **how: Any) -> Mapping[str, float]:
    now.clear()
    before = digest(self) if "BITS" in os.environ else ""
    for name, when in faults:
        if here and step + 1 == int(when):
            batch = globals()[name](self, batch)
    try:
        return take(self, batch, step, **how)
    finally:
        if "BITS" in os.environ:
            line = {"step": step + 1, "before": before, "after": digest(self)}
            with (Path(os.environ["BITS"]) / f"{self.world.rank}.jsonl").open("a") as notes:
                print(json.dumps(line), file=notes)


def digest(step: TrainStep) -> str:
    objective = step.objective
    assert isinstance(objective, Objective)
    state = capture({"towers": step.towers, "objective": objective}, step.optimizer, 0, {})
    table = None if objective.sample_state is None else objective.sample_state._table
    memory = {} if table is None else {"": table.nan_to_num(-1.0)}
    parts = [save({k: v.contiguous() for k, v in part.items()}) for part in (state.model, state.optimizer, memory)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def stop_at_the_evaluators() -> None:
    from dyad.evaluation import suite

    def stopped(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    suite.build_evaluators = stopped  # type: ignore[assignment]


def busy_at_the_evaluators() -> None:
    build = dyad.run.components.build_evaluators

    def busy(*arguments: Any) -> Any:
        if os.environ["RANK"] == "0":
            Path(os.environ["MARK"]).touch()
            time.sleep(float(os.environ["BUSY"]))
        return build(*arguments)

    dyad.run.components.build_evaluators = busy


def other_code() -> None:
    dyad.train.distributed.consistency.PACKAGE = Path(os.environ["CODE"])


def other_data() -> None:
    os.chdir(Path(os.environ["DATA"]) / os.environ["RANK"])


AT_THE_START: dict[str, Callable[[], None]] = {
    f.__name__: f for f in (stop_at_the_evaluators, busy_at_the_evaluators, other_code, other_data)
}

for name, when in faults:
    if when == "start" and here:
        AT_THE_START[name]()
faults = [(name, when) for name, when in faults if when != "start"]
TrainStep.__call__ = taken  # type: ignore[method-assign]
Objective.forward = measured  # type: ignore[method-assign]
runpy.run_module(os.environ.get("MODULE", "train"), run_name="__main__", alter_sys=True)
