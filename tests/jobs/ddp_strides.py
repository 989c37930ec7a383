"""Job: what DistributedDataParallel prints of the image tower of emoji_scratch: ours, or torch's own with "plain"."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from dyad.train.cli.compose import compose_config
from dyad.train.distributed.data_parallel import _wrapped
from dyad.train.distributed.world import World
from dyad.train.towers.build import build_model


def main() -> None:
    tower = build_model(compose_config(["experiment=emoji_scratch"])).towers.x_tower
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    is_plain = "plain" in sys.argv
    wrapped = DistributedDataParallel(tower, gradient_as_bucket_view=True) if is_plain else _wrapped(tower, World(0, 2))
    for _ in range(2):
        wrapped(torch.zeros(4, 3, 64, 64, dtype=torch.uint8)).sum().backward()
        wrapped.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
