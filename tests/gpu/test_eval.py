"""Evaluation on a GPU: the numbers of a CPU, bounded memory, and the speed of the bare tower."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dyad.eval.encode.encoder import Encoder
from dyad.eval.metrics.matches import Labels, Matches
from dyad.eval.search import index
from dyad.eval.search.index import Index
from dyad.eval.search.index_spec import load_faiss
from dyad.eval.search.ranks import count_ranks
from dyad.train.distributed.devices import has_faiss_gpu
from dyad.train.distributed.world import World
from gpu.bare import flops_per_second, synchronize
from gpu.needs import DEVICES, ON_GPU, TRAINER, packages

MANY = {"cpu": 500, "cuda": 10**6}  # queries, and items
REFRESH = {
    "lists": "[mined]",
    "per_row": 1,
    "refresh_every": 4,
    "mining.first_rank": 1,
    "mining.last_rank": 20,
    "mining.keep": 3,
}


def queries_and_items(count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((count, width), dtype=np.float32)
    return queries, queries + 3 * rng.standard_normal((count, width), dtype=np.float32)


def own_items(count: int) -> Matches:
    own = Labels(np.arange(count), np.arange(count), count)
    return Matches(own, own)


def world_of(device: str) -> World:
    return World(device=torch.device(device, 0) if device == "cuda" else torch.device(device))


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_are_those_of_numpy(device: str) -> None:
    queries, items = queries_and_items(500, 32)
    matches = own_items(500)
    scores = queries.astype(np.float64) @ items.T.astype(np.float64)
    want = 1 + (scores > scores.diagonal()[:, None]).sum(1)
    assert (count_ranks(queries, items, matches, world_of(device)).rank == want).mean() >= 0.998


def measured(run: Callable[[], object], name: str, count: int, width: int, device: str, record_property: Any) -> None:
    """Record the seconds and memory of a run with `count` queries and items; the memory holds the items and strips."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated() if device == "cuda" else 0, perf_counter()
    run()
    took = perf_counter() - start
    least = 2 * count**2 * width / flops_per_second(device, torch.float32)
    record_property(f"{name} of width {width}: seconds", (took, least / took, "the bare products in float32"))
    if device == "cuda":
        more = torch.cuda.max_memory_allocated() - before
        record_property(f"{name}: GB", more / 1e9)
        assert more <= 2 * count * width * 4 + 8e9


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_of_many_among_many(device: str, record_property: Any) -> None:
    count, width = MANY[device], 128
    queries, items = queries_and_items(count, width)
    run = partial(count_ranks, queries, items, own_items(count), world_of(device))
    measured(run, f"ranks, {count:,} among {count:,}", count, width, device, record_property)


@pytest.mark.parametrize("device", DEVICES)
def test_exact_search_of_many_in_many(device: str, record_property: Any) -> None:
    count, width = MANY[device], 128
    queries, items = queries_and_items(count, width)
    index = Index(items, world=world_of(device))
    run = partial(index.search, queries, 10)
    measured(run, f"exact search, {count:,} in {count:,}", count, width, device, record_property)


@ON_GPU
@packages("faiss")
def test_an_approximate_index_finds_the_same_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_faiss_gpu(load_faiss()):
        pytest.skip("needs faiss for GPUs: faiss-gpu-cuvs")
    queries, items = queries_and_items(20_000, 64)
    on_gpu = Index(items, "IVF64,Flat;nprobe=16").search(queries, 10)
    monkeypatch.setattr(index, "has_faiss_gpu", lambda faiss: False)
    on_cpu = Index(items, "IVF64,Flat;nprobe=16").search(queries, 10)
    assert (on_gpu.positions == on_cpu.positions).mean() >= 0.95


class Images:
    """Random images in memory, as the encoder reads them."""

    def __init__(self, count: int, size: int) -> None:
        self.pixels = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.pixels)

    def block(self, start: int, stop: int) -> Tensor:
        return self.pixels[start:stop]


@packages("open_clip", "timm")
@pytest.mark.parametrize("device", DEVICES)
def test_encoding_is_as_fast_as_the_bare_tower(device: str, tmp_path: Path, record_property: Any) -> None:
    """80 % of its images a second, reading from memory."""
    from gpu.models import vit

    tower = vit(device, tmp_path).x_tower.to(device).eval()
    images, block = (Images(8192, 224), 512) if device == "cuda" else (Images(32, 32), 16)
    encode = Encoder({"x": tower}, world_of(device), block=block, workers=0, precision="bf16")

    def bare() -> None:
        pinned = images.pixels.pin_memory() if device == "cuda" else images.pixels
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16):
            for part in pinned.split(block):
                tower(part.to(device, non_blocking=True)).float().cpu()

    seconds = []
    for run in (bare, lambda: encode("x", images)):
        run()
        start = perf_counter()
        run()
        synchronize(device)
        seconds.append(perf_counter() - start)
    rate, share = len(images) / seconds[1], seconds[0] / seconds[1]
    record_property("encoding with ViT-B-32, images a second", (rate, share, "the bare tower"))
    assert device == "cpu" or share >= 0.8


@ON_GPU
@TRAINER
def test_negatives_are_mined_anew_while_training(tmp_path: Path, models: Path, commands: Any) -> None:
    from helpers.topics import arguments, write_topics

    (tmp_path / "topics").mkdir()
    keys = {f"data.negatives.{key}": value for key, value in REFRESH.items()}
    ended = commands.run(*arguments(models / "bert", write_topics(tmp_path / "topics"), tmp_path / "runs", keys))
    assert ended.code == 0, ended.out
