"""The same numbers to the last bit before and after a change that must change none.

    python -m tests.same_bits record FILE    before the change: trains, evaluates, mines and writes digests to FILE
    python -m tests.same_bits compare FILE   after it: does the same and lists what differs; exit 1 if anything does

Names of runs after FILE, as emoji-1 sharded-2, choose some of them; without any all are made.

Twenty steps of each experiment with one and with two processes, at one thread each: every number of metrics.jsonl but
the times, every tensor of the last checkpoint, every number of an evaluation, every line of mined negatives; the corpus
of topics is evaluated and mined by one process only. Both runs must be made on one machine: other processors round
differently. About fifteen minutes on two idle cores.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

ROOT = Path(__file__).parent.parent
TIMES = ("time", "seconds", "per_second", "second", "eta", "memory", "bytes", "versions", "environment", "rss", "_mb")
RUNS = {
    "emoji": ["experiment=emoji"],
    "emoji_scratch": ["experiment=emoji_scratch"],
    "topics": ["experiment=topics"],
    "fastclip_v3": ["experiment=emoji", "objective=fastclip_v3"],
    "views_with_a_target": ["experiment=spectral_emoji", "objective=spectral_alternating"],
    "labelled": ["experiment=classes_emoji"],
    "two_losses": ["experiment=slip_emoji"],
    "sharded": ["experiment=emoji", "dist=fsdp2", "chunk_size=64"],
    "resumed": ["experiment=emoji", "objective=fastclip_v3", "optim.ema=0.9", "checkpoint.every=10"],
    "resumed_sharded": ["experiment=emoji", "dist=fsdp2", "chunk_size=64", "checkpoint.every=10"],
}


def run(*arguments: str, processes: int = 1) -> None:
    start = [sys.executable, "-m"]
    if processes > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    subprocess.run([*start, *arguments], cwd=ROOT, env={**os.environ, **quiet}, check=True, stdout=sys.stderr)


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every number below this value with the path of its keys; times and memory are left out."""
    if isinstance(value, dict):
        for key, below in value.items():
            if not any(word in key for word in TIMES):
                yield from numbers(below, f"{name}/{key}")
    elif isinstance(value, list):
        for i, below in enumerate(value):
            yield from numbers(below, f"{name}/{i}")
    elif isinstance(value, float | int):
        yield name, repr(value)


def digest(folder: Path) -> dict[str, str]:
    """Names and digests of all that a run folder says."""
    found: dict[str, str] = {}
    for line, text in enumerate((folder / "metrics.jsonl").read_text().splitlines()):
        found |= {f"metrics/{line}{name}": value for name, value in numbers(json.loads(text))}
    last = max((folder / "checkpoints").glob("step_*"))
    for path in sorted(last.rglob("*.safetensors")):
        with safe_open(path, "numpy") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (no mapping)
                found[f"{path.name}/{key}"] = hashlib.sha256(tensors.get_tensor(key).tobytes()).hexdigest()
    for path in sorted((folder / "eval").glob("*.json")):
        found |= {f"eval/{path.name}{name}": value for name, value in numbers(json.loads(path.read_text()))}
    for path in sorted((folder / "mined").glob("mined.jsonl")):
        found["mined"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def recorded(chosen: list[str]) -> dict[str, dict[str, str]]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for processes in (1, 2):
            for name, keys in RUNS.items():
                ours = Path(folder) / f"{name}-{processes}"
                if chosen and ours.name not in chosen:
                    continue
                common = [
                    f"run.dir={folder}",
                    f"run.name={ours.name}",
                    "steps=20",
                    "tracking=local",
                    "tracking.every=1",
                ]
                if name == "topics" and processes > 1:  # its corpus takes minutes to encode: once is enough
                    common += ["data.val=null", "eval.suite=[]"]
                run("train", *keys, *common, processes=processes)
                if name.startswith("resumed"):
                    shutil.rmtree(ours / "checkpoints/step_00000020")  # the run goes on at step 10
                    run("train", *keys, *common, processes=processes)
                if name == "topics" and processes == 1:
                    run("eval.mine", f"run={ours}", f"out={ours}/mined", processes=processes)
                if name == "emoji":
                    run("eval", f"checkpoint={ours}", processes=processes)
                found[ours.name] = digest(ours)
    return found


def main() -> int:
    if len(sys.argv) < 3 or sys.argv[1] not in ("record", "compare"):
        print(__doc__, file=sys.stderr)
        return 2
    now, path = recorded(sys.argv[3:]), Path(sys.argv[2])
    if sys.argv[1] == "record":
        path.write_text(json.dumps(now))
        print(f"{sum(map(len, now.values()))} numbers and digests of {len(now)} runs in {path}")
        return 0
    before = json.loads(path.read_text())
    if sys.argv[3:]:
        before = {name: before[name] for name in now}
    differ = [
        f"{name} {key}: {before.get(name, {}).get(key)} before, {now.get(name, {}).get(key)} now"
        for name in sorted(before | now)
        for key in sorted(before.get(name, {}) | now.get(name, {}))
        if before.get(name, {}).get(key) != now.get(name, {}).get(key)
    ]
    print("\n".join(differ[:100]))
    print(f"{sum(map(len, before.values()))} before, {sum(map(len, now.values()))} now, {len(differ)} differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
