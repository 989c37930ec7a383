"""A whole small run, wired as `python -m train` wires a real one.

python tests/helpers/loop.py RUN_DIR SECONDS_PER_STEP starts it anew in a process of its own for every line of standard
input, and prints its process id and, when it is gone, its wait status. (A start from nothing takes seconds of imports.)
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from dyad.data.batch import Batch
from dyad.data.config import DataConfig
from dyad.train.config import TrackingConfig, Wandb
from dyad.train.distributed.signals import StopRequest
from dyad.train.distributed.world import World
from dyad.train.monitor.bad_samples import BadSampleCounter
from dyad.train.monitor.monitor import Monitor
from dyad.train.monitor.stragglers import LocalTimer, Stragglers
from dyad.train.run_folder.checkpoint import Checkpoint, find_undamaged, tidy
from dyad.train.run_folder.checkpoint_state import capture, restore
from dyad.train.run_folder.ledger import Ledger
from dyad.train.run_folder.run_state import RunState, locked
from dyad.train.run_folder.saving import CheckpointWriter
from dyad.train.run_schedule import RunSchedule
from dyad.train.step.loop import fit
from dyad.train.tracking.logger import build_logger

STEPS, BATCH, WIDTH = 20, 8, 64


class Toy:
    """A regression whose data and dropout depend on the step alone."""

    def __init__(self, pause: float = 0.0) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))
        self.modules: dict[str, nn.Module] = {"net": self.net}
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.pause = pause

    def batches(self, first: int, last: int) -> Iterator[Batch]:
        for step in range(first, last):
            ids = torch.arange(step * BATCH, (step + 1) * BATCH)
            x, y = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
            yield Batch(x, y, ids, ids, ids)

    def step(self, batch: Batch, index: int) -> dict[str, float]:
        time.sleep(self.pause)
        torch.manual_seed(1000 + index)
        loss = ((self.net(batch.x) - batch.y) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item(), "lr": 0.01, "grad_norm": 0.0}

    def evaluate(self, step: int) -> dict[str, float]:
        self.net.eval()
        with torch.no_grad():
            error = self.net(torch.ones(1, WIDTH)).square().mean().item()
        self.net.train()
        return {"val/error": error}


def quiet_monitor() -> Monitor:
    """The monitor of a run in one process, which has nothing to say."""
    world, ledger = World(), Ledger(None, 0, print)
    stragglers = Stragglers(LocalTimer(world.device), 0.7, world, print)
    bad_samples = BadSampleCounter(DataConfig(), [BATCH], world, ledger, print)
    return Monitor(stragglers, bad_samples, {}, 0, ledger, world, print)


def run(run_dir: Path, pause: float = 0.0, toy: Toy | None = None) -> tuple[str, int]:
    """Train the toy in `run_dir`, from its newest checkpoint if there is one; return (status, last step)."""
    toy = toy or Toy(pause)
    run_dir.mkdir(parents=True, exist_ok=True)
    with locked(run_dir), StopRequest() as stop:
        tidy(run_dir)
        found = find_undamaged(run_dir, print)
        state = None if found is None else Checkpoint(found).read()
        if state:
            restore(state, toy.modules, toy.optimizer)
        first, owed = (state.step, state.metadata["owed"]) if state else (0, False)
        schedule = RunSchedule(
            first, STEPS, BATCH, 1, 1, evaluate_every=5, save_every=3, evaluation_owed=owed, steps_per_epoch=STEPS
        )
        logger = build_logger(run_dir, TrackingConfig(wandb=Wandb.disabled), schedule, {})

        writer = CheckpointWriter(run_dir, 2, logger.flush, schedule, logger.print)

        def write(step: int, evaluation_owed: bool, last: bool) -> None:
            writer.wait()
            state = capture(toy.modules, toy.optimizer, step, {"owed": evaluation_owed})
            (writer.save if last else writer.save_in_background)(state)

        with logger, RunState(run_dir, first, STEPS) as record, writer:
            status, step = fit(
                schedule,
                toy.batches(first, STEPS),
                step=toy.step,
                monitor=quiet_monitor(),
                diagnose=lambda: {},
                evaluate=toy.evaluate,
                save=write,
                should_stop=lambda: stop.requested,
                logger=logger,
            )
            record.write(status, step)
    return status, step


def start_again_and_again(run_dir: Path, pause: float) -> None:
    """Start a run in a fork for each line of standard input; print its process id and, at its end, its wait status."""
    import torch._dynamo  # the first step of an optimiser would import it

    torch.set_num_threads(1)
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            run(run_dir, pause)
            os._exit(0)
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    start_again_and_again(Path(sys.argv[1]), float(sys.argv[2]))
