"""CPU time of mining with an approximate index: 16,384 queries searched at a time, and all queries.

    python -m tests.benchmarks.mining [ITEMS] [QUERIES] [WIDTH] [INDEX]

Made embeddings of half precision around centres, memory-mapped as those of eval.mine; no item is right, and nothing is
read but embeddings.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np

from dyad.data.config import MiningConfig
from dyad.data.shards.storage import sha256_of
from dyad.eval.mine import mining
from dyad.eval.mine.mining import BLOCK, LabelledQuery, MiningInput
from dyad.eval.search.index import _Approximate
from dyad.train.distributed.world import World

CENTRES, SPREAD, AT_A_TIME = 2000, 0.5, 100_000


def written(path: Path, rows: int, width: int, seed: int) -> np.ndarray:
    chance = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((CENTRES, width), dtype=np.float32)
    array = np.lib.format.open_memmap(path, "w+", np.float16, (rows, width))
    for start in range(0, rows, AT_A_TIME):
        count = min(AT_A_TIME, rows - start)
        near = centres[chance.integers(CENTRES, size=count)]
        array[start : start + count] = near + SPREAD * chance.standard_normal((count, width), dtype=np.float32)
    array.flush()
    return np.load(path, mmap_mode="r")


class Made:
    """MiningData (eval/mine/mining.py) without texts."""

    names: ClassVar[tuple[str, str]] = ("queries", "items")

    def __init__(self, queries: int, items: int) -> None:
        self.row_keys, self.item_keys = np.arange(queries), np.arange(items)

    def sides(self) -> Any: ...

    def labelled(self, groups: Sequence[list[int]], queries_bD: np.ndarray) -> list[LabelledQuery]:
        none = np.empty(0, np.int64)
        pairs = zip(groups, queries_bD, strict=True)
        return [LabelledQuery(str(row), (), none, none, query_D) for (row,), query_D in pairs]

    def item(self, position: int) -> tuple[str, str]:
        return str(position), str(position)


def main(items: str = "200000", queries: str = "50000", width: str = "64", index: str = "IVF512,Flat") -> None:
    m, n, D = int(items), int(queries), int(width)
    fill, config = _Approximate.filled, MiningConfig(index=index)
    took = list[float]()

    def filled(*args: Any) -> Any:
        start = process_time()
        index = fill(*args)
        took.append(process_time() - start)
        return index

    with tempfile.TemporaryDirectory() as name, patch.object(_Approximate, "filled", filled):
        folder = Path(name)
        queries_nD, items_mD = written(folder / "q.npy", n, D, 1), written(folder / "i.npy", m, D, 2)
        source = MiningInput(Made(n, m), queries_nD, items_mD)
        print(f"{m:,} × {D}, {n:,} queries, {index}")
        for at_a_time in (BLOCK, n):
            took.clear()
            start = process_time()
            with patch.object(mining, "SEARCHED_BYTES", at_a_time * (4 * D + 12 * config.last_rank)):
                mining.mine(source, config, folder / "out", World(), {})
            total, digest = process_time() - start, sha256_of(folder / "out" / mining.MINED)
            print(f"{at_a_time:,} at a time: {total:.0f} CPU s, {sum(took):.1f} of {len(took)} fillings; {digest[:8]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
