"""Seconds and memory to the first batch of a run that goes on in 10 M samples: python -m tests.benchmarks.resume

100 shards of 100,000 samples in a real index, read through the real loader; the samples of a shard are all the same
bytes, since 10 M of their own would only measure the disk. The run goes on at 1 % and at 99 % of its epoch, taking
turns; median of the rounds, each in a process of its own.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from dyad.data.batch import Batch
from dyad.data.loading.loader import build_loader
from dyad.data.loading.order import Order
from dyad.data.shards.index import MEMBER, ROW, ShardIndex
from dyad.data.shards.shards import Shards
from dyad.data.shards.sources import ShardSource
from dyad.data.shards.storage import stat

SHARDS, SAMPLES, BATCH, ROUNDS = 100, 100_000, 4096, 3
CONTENT = b'{"caption": "a"}\n'


@dataclass(frozen=True)
class Ids:
    """Reads every sample, and gives batches of ids."""

    shards: Shards

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        ids = torch.tensor([sample for _, sample in positions])
        for sample in ids.tolist():
            assert self.shards.read(sample) == {"json": CONTENT}
        return Batch(ids, ids, ids, ids, ids)

    def where(self, sample_id: int) -> str:
        return self.shards.locate(sample_id)[0].path


def write_shards(folder: Path) -> None:
    """The files, and one table of offsets for all of them."""
    rows, members = np.zeros(SAMPLES + 1, ROW), np.zeros(SAMPLES, MEMBER)
    rows["crc32"], rows["member"], members["size"] = zlib.crc32(CONTENT), np.arange(SAMPLES + 1), len(CONTENT)
    packed = np.frombuffer(b"".join((rows.data, members.data)), np.uint8)
    for number in range(SHARDS):
        (folder / f"{number:02d}.jsonl").write_bytes(CONTENT)
        np.save(folder / f"{number:02d}.npy", packed)


def opened(folder: Path) -> Shards:
    paths = [str(folder / f"{number:02d}.jsonl") for number in range(SHARDS)]
    return Shards([ShardSource(tuple(paths))], [described(path) for path in paths])


def described(path: str) -> ShardIndex:
    found = stat(path)
    return ShardIndex(
        path=path,
        name=Path(path).name,
        size=found.size,
        mtime=found.mtime,
        sha256="0" * 64,
        samples=SAMPLES,
        members=SAMPLES,
        suffixes=("json",),
        ignored={},
        problem_count=0,
        problems=(),
        table_file=path.replace(".jsonl", ".npy"),
    )


def first_batch(folder: Path, share: float, workers: int) -> dict[str, float]:
    """What a process needs from nothing opened to the first batch."""
    start = perf_counter()
    shards = opened(folder)
    order = Order(shards.sizes, shards.weights, seed=0, global_batch_size=BATCH)
    step = int(share * order.steps_per_epoch)
    loader = build_loader(
        Ids(shards), order, rank=0, world_size=1, first_step=step, last_step=step + 10, workers=workers
    )
    batch = next(iter(loader))
    seconds = perf_counter() - start
    assert batch.sample_ids.tolist() == order.ids(step).tolist()
    return {"seconds": seconds, "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder))
        for workers in (0, 2):
            found: dict[float, list[dict[str, float]]] = {0.01: [], 0.99: []}
            for _ in range(ROUNDS):
                for share, results in found.items():
                    command = [sys.executable, "-m", "tests.benchmarks.resume", folder, str(share), str(workers)]
                    results.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
            for share, results in found.items():
                seconds, rss = (statistics.median(r[key] for r in results) for key in ("seconds", "rss_mb"))
                print(f"{workers} workers, at {share:.0%} of {SHARDS * SAMPLES:,}: {seconds:.3f} s, {rss:.0f} MiB")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(first_batch(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
