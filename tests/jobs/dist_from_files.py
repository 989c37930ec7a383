"""Job for torchrun: sharded towers are loaded from a folder of bf16 weights, and no rank ever holds all of them.

Arguments: folders of two decoders of transformers (helpers.tiny_decoder). The weights and embeddings of the small one
equal those of a tower that is not sharded; loading the large one takes less memory than its float32 weights.
"""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import torch
from helpers.tiny_decoder import END
from torch.distributed.tensor import DTensor

from dyad.run.components import build_run_model
from dyad.train.config import DistConfig, ModelConfig, Parallel, Task, TextTower, TextTowerConfig, TrainConfig
from dyad.train.distributed.sharding import shard
from dyad.train.distributed.world import World, init_world, shutdown


class Growth(threading.Thread):
    """Notes the most anonymous memory of this process, in bytes, beyond that of the start: files do not count."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before, self.most, self.ended = self.now(), 0, threading.Event()
        self.start()

    def now(self) -> int:
        found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found
        return 1024 * int(found[1])

    def run(self) -> None:
        while not self.ended.wait(0.002):
            self.most = max(self.most, self.now() - self.before)


def check(folder: str, adapters: int, shared: bool, is_large: bool, world: World) -> None:
    text = TextTowerConfig(kind=TextTower.transformers, name=folder, lora_rank=adapters)
    model = ModelConfig(name=None, embed_dim=None, shared=shared, text=text)
    plain = TrainConfig(task=Task.question_passage, model=model)
    config = replace(plain, dist=DistConfig(name=Parallel.fsdp2))
    torch.manual_seed(0)
    growth = Growth()
    built = build_run_model(config, world)
    towers = list(dict.fromkeys((built.towers.x_tower, built.towers.y_tower)))
    held = sum(4 * p.numel() for tower in towers for p in tower.parameters())
    shard(towers, config.dist, None, False, world)
    growth.ended.set()
    growth.join()
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for tower in towers for p in tower.parameters())
    if is_large:  # its share is a half; reading all of them takes 1.05 and more
        assert growth.most < 0.9 * held, growth.most / held
        return
    torch.manual_seed(0)
    whole = build_run_model(plain, world)
    tokens = built.tokenize(["a b", "c" + END], 8)
    for tower, other in zip(towers, (whole.towers.x_tower, whole.towers.y_tower), strict=False):
        for p, q in zip(tower.parameters(), other.parameters(), strict=True):
            assert isinstance(p, DTensor) and torch.equal(p.full_tensor(), q) and q.dtype == torch.float32
        torch.testing.assert_close(tower(tokens), other(tokens))


def main() -> None:
    world = init_world(60, cpu=True)
    for folder, is_large in zip(sys.argv[1:], (False, True), strict=True):
        for adapters, shared in ((4, True), (0, False)):
            check(folder, adapters, shared, is_large, world)
    print("all checks hold")
    shutdown(world)


if __name__ == "__main__":
    main()
