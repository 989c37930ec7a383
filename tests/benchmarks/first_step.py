"""Seconds from the command to the first step beside open_clip's trainer: python -m tests.benchmarks.first_step

Both train the model and data of experiment=emoji_scratch with batches of 256 from one loader process, one thread each,
in turns; each is stopped at its first line of a step. The rows: both without a tracker, both with W&B offline, and what
importing open_clip costs, which no trainer of its models can leave out.
open_clip_train imports pandas, which Dyad does not need: install it before.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT, ROUNDS = Path(__file__).parents[2], 5
SHARD = ROOT / "data" / "samples" / "emoji" / "noto-trained.tar"
THEIRS = """
import sys, open_clip
open_clip.add_model_config("configs/model/tiny_clip_gn.json")
from open_clip_train.main import main
main(sys.argv[1:])
"""


def write_table(folder: Path) -> None:
    """Write the images of SHARD and a table of their captions, captions.csv, which open_clip_train reads."""
    rows = ["filepath\ttitle"]
    with tarfile.open(SHARD) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file
            path = folder / member.name
            if path.suffix == ".json":
                rows.append(f"{path.with_suffix('.webp')}\t{json.load(file)['caption']}")
            else:
                path.write_bytes(file.read())
    (folder / "captions.csv").write_text("\n".join(rows) + "\n")


def commands(folder: Path, epochs: int = 1, steps: int = 8) -> dict[str, list[str]]:
    """Name → command, each with its outputs in `folder`, which holds the data. epochs of theirs, steps of ours."""
    table = folder / "captions.csv"
    theirs = f"""--model tiny_clip_gn --train-data {table} --dataset-type csv --batch-size 256 --workers 1
        --epochs {epochs} --warmup 50 --precision fp32 --device cpu --log-every-n-steps 1 --logs {folder}""".split()
    ours = f"""-m dyad train experiment=emoji_scratch data.train={SHARD} data.val=null eval.suite=[] steps={steps}
        data.workers=1 tracking.every=1 run.dir={folder}""".split()
    python = [sys.executable, "-u"]
    return {
        "open_clip_train": [*python, "-c", THEIRS, *theirs],
        "dyad tracking=local": [*python, *ours, "tracking=local"],
        "open_clip_train --report-to wandb": [*python, "-c", THEIRS, *theirs, "--report-to", "wandb"],
        "dyad": [*python, *ours],
        "import open_clip": [*python, "-c", "import open_clip; print('Train Epoch')"],
    }


def seconds_to_first_step(command: list[str], folder: str) -> float:
    """Start the command; return the seconds until its first line of a step, and stop it. folder: for W&B."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_DIR": folder}
    started = time.perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout
        read = []
        for line in process.stdout:
            read.append(line)
            if "Train Epoch" in line:
                seconds = time.perf_counter() - started
                process.kill()
                return seconds
    raise SystemExit(f"{' '.join(command)}\nended before its first step:\n{''.join(read[-20:])}")


def main() -> None:
    """Print the median seconds of each command, and their ratio to open_clip_train's."""
    taken: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            write_table(Path(folder))
            for name, command in commands(Path(folder)).items():
                taken.setdefault(name, []).append(seconds_to_first_step(command, folder))
    peer = statistics.median(taken["open_clip_train"])
    print(f"seconds to the first step, median of {ROUNDS} (least to most)")
    for name, seconds in taken.items():
        median = statistics.median(seconds)
        print(f"{name:<34} {median:6.2f} ({min(seconds):.2f} to {max(seconds):.2f}), {median / peer:.2f} of the peer")


if __name__ == "__main__":
    main()
