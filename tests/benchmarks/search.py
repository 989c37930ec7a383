"""Exact search and ranks by counting, against the bare matrix products: CPU seconds of one thread, and peak memory.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.search [items=20000] [width=512] [indexes=no]

All methods in one process, taking turns; the median of three rounds. indexes=yes: then every kind of index, once: its
making, its search and what it finds of the exact ten best. Prints tables for RESULTS.md.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dyad.eval.search.index import Hits, Index
from dyad.eval.search.ranks import STRIP, count_ranks
from dyad.eval.tasks.image_text_retrieval import match_pairs
from dyad.train.distributed.world import World
from dyad.train.eval_config import Truth

ROUNDS = 3
SPECS = ("Flat", "IVF256,Flat;nprobe=16", "IVF256,PQ32x4;nprobe=16", "HNSW32;efSearch=128")


def main() -> None:
    given = dict(word.split("=") for word in sys.argv[1:])
    n, width = int(given.get("items", 20_000)), int(given.get("width", 512))
    assert os.environ.get("OMP_NUM_THREADS") == "1", "set OMP_NUM_THREADS=1: CPU time of several threads is noise"
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((n, width), dtype=np.float32)
    items = queries + 3 * rng.standard_normal((n, width), dtype=np.float32)
    own = np.arange(n)
    matches, _ = match_pairs(own, own, own, Truth.pairs)
    world = World(rank=0, size=1, device=torch.device("cpu"))
    methods: dict[str, Callable[[], object]] = {
        "GEMM, strips": lambda: products(queries, items),
        "FAISS flat, top 10": lambda: Index(items).search(queries, 10),
        "ranks by counting": lambda: count_ranks(queries, items, matches, world),
        "GEMM + topk 10, strips": lambda: top(queries, items, 10),
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    memory: dict[str, int] = {}
    for _ in range(ROUNDS):
        for name, method in methods.items():
            with_peak(lambda: seconds[name].append(timed(method)), memory, name)  # noqa: B023
    floor = statistics.median(seconds["GEMM, strips"])
    print(f"\n{n:,} queries × {n:,} items, D = {width}, fp32, one thread, strips of {STRIP:,} scores")
    print("| method | CPU s | GF/s | × GEMM | peak extra MB |\n|---|---|---|---|---|")
    for name, values in seconds.items():
        median = statistics.median(values)
        rate = 2 * n * n * width / median / 1e9
        print(f"| {name} | {median:.2f} | {rate:.0f} | {median / floor:.2f} | {memory[name]} |")
    if given.get("indexes") == "yes":
        compare_indexes(queries[:1000], items)


def compare_indexes(queries: np.ndarray, items: np.ndarray) -> None:
    print("\n| index | making, CPU s | search, CPU s | recall@10 |\n|---|---|---|---|")
    for spec in SPECS:
        found: list[Hits] = []
        start = time.process_time()
        index = Index(items, spec)
        index.search(queries[:1], 10)  # fills it
        making = time.process_time() - start
        seconds = timed(lambda: found.append(index.search(queries, 10)))  # noqa: B023
        print(f"| {spec} | {making:.2f} | {seconds:.2f} | {index.recall_against_exact(found[0], queries):.3f} |")


def products(queries: np.ndarray, items: np.ndarray) -> None:
    for part in torch.from_numpy(queries).split(max(1, STRIP // len(items))):
        torch.mm(part, torch.from_numpy(items).T)


def top(queries: np.ndarray, items: np.ndarray, k: int) -> None:
    for part in torch.from_numpy(queries).split(max(1, STRIP // len(items))):
        (part @ torch.from_numpy(items).T).topk(k)


def timed(method: Callable[[], object]) -> float:
    start = time.process_time()
    method()
    return time.process_time() - start


def with_peak(call: Callable[[], object], memory: dict[str, int], name: str) -> None:
    """Run `call`; keep the largest growth of resident memory in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call()
    memory[name] = max(memory.get(name, 0), resident("VmHWM") - before)


def resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) // 1024


if __name__ == "__main__":
    main()
