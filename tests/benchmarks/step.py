"""CPU time of one training step: written by hand, with one chunk, and with several of which some keep their graphs.

python -m tests.benchmarks.step [PAIRS]   a small ViT and text transformer of open_clip, patch dropout, clip, AdamW
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time

import torch

from dyad.data.batch import Batch
from dyad.train.config import ModelConfig, OptimConfig, TrainConfig
from dyad.train.distributed.world import World
from dyad.train.losses import build_objective
from dyad.train.step.loss_term import LossTerm
from dyad.train.step.optim import build_optimizer
from dyad.train.step.step import TrainStep
from dyad.train.towers.build import build_image_text
from dyad.train.towers.tower import TwoTower

ROUNDS = 7
CHUNKS = ((1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (8, 1), (8, 4))  # chunks, and how many of them keep their graphs
MODEL = {
    "embed_dim": 128,
    "vision_cfg": {
        "image_size": 64,
        "layers": 4,
        "width": 192,
        "head_width": 32,
        "patch_size": 16,
        "patch_dropout": 0.25,
    },
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 128, "heads": 4, "layers": 3},
}


def model() -> TwoTower:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "benchmark_step.json"
        path.write_text(json.dumps(MODEL))
        return build_image_text(ModelConfig(name=str(path))).towers


def batch(count: int) -> Batch:
    x = torch.randint(0, 256, (count, 3, 64, 64), dtype=torch.uint8)
    y, ids = torch.randint(1, 49000, (count, 16)), torch.arange(count)
    return Batch(x, y, ids, ids, ids)


def by_hand(pairs: Batch) -> Callable[[int], object]:
    towers, objective = model().train(), build_objective("clip")
    optimizer = build_optimizer([*towers.named_parameters(), *objective.named_parameters()], OptimConfig())

    def step(index: int) -> None:
        optimizer.zero_grad()
        loss = objective(towers.x_tower(pairs.x), towers.y_tower(pairs.y)).loss
        loss.backward()
        torch.nn.utils.get_total_norm([p.grad for p in towers.parameters() if p.grad is not None]).item()
        optimizer.step()

    return step


def ours(pairs: Batch, chunks: int, kept: int | None) -> Callable[[int], object]:
    config = TrainConfig(global_batch_size=len(pairs), chunk_size=-(-len(pairs) // chunks), keep_graphs=kept)
    step = TrainStep([LossTerm(model(), build_objective("clip"), config, 10**6, World())])
    return lambda index: step(pairs, index)


def main() -> None:
    count = int(sys.argv[1]) if sys.argv[1:] else 256
    pairs = batch(count)
    methods = {"written by hand": by_hand(pairs)}
    methods |= {f"{k} chunk(s), {m} graph(s) kept": ours(pairs, k, m) for k, m in CHUNKS}
    methods["4 chunks, graphs by free memory"] = ours(pairs, 4, None)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for index in range(ROUNDS + 1):
        for name, step in methods.items():
            start = process_time()
            step(index)
            seconds[name].append(process_time() - start)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    print(f"{count} pairs, {torch.get_num_threads()} thread(s), median of {ROUNDS} rounds\n")
    print("| step | CPU ms | ratio |\n|---|---|---|")
    for name, value in medians.items():
        print(f"| {name} | {value * 1e3:.0f} | {value / medians['written by hand']:.2f} |")


if __name__ == "__main__":
    main()
