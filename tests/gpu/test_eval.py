"""Evaluation on a GPU: the numbers of a CPU, bounded memory, and the speed of the bare tower."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu.needs import DEVICES, ON_GPU, TRAINER, packages

pytest.importorskip("faiss")

from dyad.eval.config import Truth
from dyad.eval.encode.encoder import Encoder
from dyad.eval.search import index
from dyad.eval.search.index import Index
from dyad.eval.search.index_spec import has_gpu, load_faiss
from dyad.eval.search.ranks import count_ranks
from dyad.eval.tasks.image_text_retrieval import match_pairs
from dyad.train.distributed.world import World

MILLION = 10**6
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


def world_of(device: str) -> World:
    return World(device=torch.device(device, 0) if device == "cuda" else torch.device(device))


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_are_those_of_numpy(device: str) -> None:
    queries, items = queries_and_items(500, 32)
    own = np.arange(500)
    matches, _ = match_pairs(own, own, own, Truth.pairs)
    scores = queries.astype(np.float64) @ items.T.astype(np.float64)
    want = 1 + (scores > scores.diagonal()[:, None]).sum(1)
    assert (count_ranks(queries, items, matches, world_of(device)).rank == want).mean() >= 0.998


@ON_GPU
def test_ranks_of_a_million_among_a_million(record_property: Any) -> None:
    """In memory for the items and strips of scores."""
    queries, items = queries_and_items(MILLION, 128)
    own = np.arange(MILLION)
    matches, _ = match_pairs(own, own, own, Truth.pairs)
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), perf_counter()
    count_ranks(queries, items, matches, world_of("cuda"))
    record_property("ranks, 1 M among 1 M of width 128: seconds", perf_counter() - start)
    more = torch.cuda.max_memory_allocated() - before
    record_property("ranks, 1 M among 1 M: GB", more / 1e9)
    assert more <= 2 * items.nbytes + 8e9


@ON_GPU
def test_exact_search_of_a_million_in_a_million(record_property: Any) -> None:
    queries, items = queries_and_items(MILLION, 128)
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), perf_counter()
    Index(items, world=world_of("cuda")).search(queries, 10)
    record_property("exact search, 1 M in 1 M of width 128: seconds", perf_counter() - start)
    more = torch.cuda.max_memory_allocated() - before
    record_property("exact search, 1 M in 1 M: GB", more / 1e9)
    assert more <= 2 * items.nbytes + 8e9


@ON_GPU
def test_an_approximate_index_finds_the_same_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_gpu(load_faiss()):
        pytest.skip("needs faiss for GPUs: faiss-gpu-cuvs")
    queries, items = queries_and_items(20_000, 64)
    on_gpu = Index(items, "IVF64,Flat;nprobe=16").search(queries, 10)
    monkeypatch.setattr(index, "has_gpu", lambda faiss: False)
    on_cpu = Index(items, "IVF64,Flat;nprobe=16").search(queries, 10)
    assert (on_gpu.positions == on_cpu.positions).mean() >= 0.95


class Pictures:
    """Random pictures in memory, as the encoder reads them."""

    def __init__(self, count: int) -> None:
        self.pixels = torch.randint(0, 256, (count, 3, 224, 224), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.pixels)

    def block(self, start: int, stop: int) -> Tensor:
        return self.pixels[start:stop]


@ON_GPU
@packages("open_clip", "timm")
def test_encoding_is_as_fast_as_the_bare_tower(record_property: Any) -> None:
    """80 % of its pictures a second, reading from memory."""
    from dyad.train.config import ModelConfig
    from dyad.train.towers.build import build_image_text

    tower = build_image_text(ModelConfig(name="ViT-B-32"), load_pretrained=False).towers.x_tower.cuda().eval()
    pictures = Pictures(8192)
    encode = Encoder({"x": tower}, world_of("cuda"), block=512, workers=0, precision="bf16")

    def bare() -> None:
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            for part in pictures.pixels.pin_memory().split(512):
                tower(part.cuda(non_blocking=True)).float().cpu()

    seconds = []
    for run in (bare, lambda: encode("x", pictures)):
        run()
        start = perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    record_property("encoding, speed beside the bare tower", seconds[0] / seconds[1])
    assert seconds[0] / seconds[1] >= 0.8


@ON_GPU
@TRAINER
def test_negatives_are_mined_anew_while_training(tmp_path: Path, models: Path, commands: Any) -> None:
    from helpers.topics import arguments, write_topics

    (tmp_path / "topics").mkdir()
    keys = {f"data.negatives.{key}": value for key, value in REFRESH.items()}
    ended = commands.run(*arguments(models / "bert", write_topics(tmp_path / "topics"), tmp_path / "runs", keys))
    assert ended.code == 0, ended.out
