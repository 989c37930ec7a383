"""CPU time of saving and resuming 100 M weights with AdamW (1.2 GB), beside torch.save and torch.load.

OMP_NUM_THREADS=1 python -m tests.benchmarks.checkpoint [FOLDER]

Theirs: torch.save of weights and optimiser, and fsync; torch.load and load_state_dict. Ours: the writing of a
checkpoint; finding the newest, loading and restoring it, on one rank. They take turns, each in a process of its own, as
a resume finds no memory that an earlier one has used; medians.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time, sleep

import torch
from torch import nn

from dyad.data.base.files import sync
from dyad.train.run_folder import checkpoint
from dyad.train.run_folder.checkpoint import Checkpoint
from dyad.train.run_folder.checkpoint_state import capture, restore
from dyad.train.run_folder.saving import write_checkpoint

ROUNDS, LAYERS, WIDTH = 5, 24, 2048
SETTLED = 3  # seconds after which a file counts as unchanged (digests.py)


class Ours:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: dict[str, nn.Module] = {"towers": model()}
        self.optimizer = torch.optim.AdamW(self.modules["towers"].parameters(), fused=True)

    def save(self) -> None:
        write_checkpoint(self.folder, capture(self.modules, self.optimizer, 1, {}), keep=1)

    def resume(self) -> None:
        found = checkpoint.find_undamaged(self.folder, print)
        assert found is not None
        restore(Checkpoint(found).read(), self.modules, self.optimizer)


class Torch:
    def __init__(self, folder: Path) -> None:
        self.file, self.model = folder / "theirs.pt", model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def save(self) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, self.file)
        sync(self.file)

    def resume(self) -> None:
        state = torch.load(self.file, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


METHODS = {"ours": Ours, "torch": Torch}


def model() -> nn.Module:
    """100 M weights, all 0."""
    layers = (nn.Linear(WIDTH, WIDTH, device="meta").to_empty(device="cpu") for _ in range(LAYERS))
    found = nn.Sequential(*layers)
    for weight in found.parameters():
        weight.data.zero_()
    return found


def seconds(work: Callable[[], object]) -> float:
    start = process_time()
    work()
    return process_time() - start


def measured(method: str, what: str, folder: Path) -> float:
    """CPU seconds of one save after a step, or of one resume, in this process."""
    run = METHODS[method](folder)
    if what == "resume":
        return seconds(run.resume)
    for group in run.optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.randn_like(weight)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return seconds(run.save)


def main(place: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=place) as folder:
        for what in ("save", "resume"):
            taken: dict[str, list[float]] = {method: [] for method in METHODS}
            for _ in range(ROUNDS):
                for method, times in taken.items():
                    command = [sys.executable, "-m", "tests.benchmarks.checkpoint", method, what, folder]
                    times.append(float(subprocess.run(command, check=True, capture_output=True).stdout))
            own, peer = (statistics.median(times) for times in taken.values())
            spread = ", ".join(f"{name} {min(times):.2f} to {max(times):.2f}" for name, times in taken.items())
            print(f"{what}: ours {own:.2f} CPU s, torch {peer:.2f}, ratio {own / peer:.2f}; {spread}", flush=True)
            sleep(SETTLED)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(measured(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
    else:
        main(sys.argv[1] if sys.argv[1:] else None)
