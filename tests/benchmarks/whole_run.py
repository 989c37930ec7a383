"""A whole run beside open_clip's trainer: python -m tests.benchmarks.whole_run

Both train the model and data of experiment=emoji_scratch for EPOCHS epochs with batches of 256 from one loader process,
one thread each, in turns, from the command to its end: imports, steps, a checkpoint. CPU seconds of all processes, and
seconds. open_clip_train imports pandas, which Dyad does not need: install it before.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

from tests.benchmarks.first_step import ROOT, SHARD, commands, write_table

ROUNDS, EPOCHS, BATCH = 3, 5, 256


def seconds_of(command: list[str], folder: str) -> tuple[float, float]:
    """Run a command to its end; return CPU seconds of it and its children, and seconds. folder: for its files."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_DIR": folder}
    before, started = os.times(), time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return cpu, time.perf_counter() - started


def main() -> None:
    """Print the medians of both programs, and our share of the peer's."""
    with tarfile.open(SHARD) as tar:
        images = sum(name.endswith(".json") for name in tar.getnames())
    taken: dict[str, list[tuple[float, float]]] = {"open_clip_train": [], "dyad tracking=local": []}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            write_table(Path(folder))
            both = commands(Path(folder), EPOCHS, EPOCHS * (images // BATCH))  # theirs leaves out the rest of an epoch
            for name, of_program in taken.items():
                of_program.append(seconds_of(both[name], folder))
    for i, what in enumerate(("CPU seconds", "seconds")):
        theirs, ours = ([run[i] for run in runs] for runs in taken.values())
        print(f"{what} of {EPOCHS} epochs, median of {ROUNDS} (least to most)")
        for name, seconds in (("open_clip_train", theirs), ("dyad", ours)):
            median = statistics.median(seconds)
            share = median / statistics.median(theirs)
            print(f"{name:<20} {median:6.1f} ({min(seconds):.1f} to {max(seconds):.1f}), {share:.2f} of the peer")


if __name__ == "__main__":
    main()
