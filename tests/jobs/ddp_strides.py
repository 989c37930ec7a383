"""Job: what DistributedDataParallel prints of the image tower of emoji_scratch: ours, and after "plain" torch's."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from dyad.train.cli.compose import compose_config
from dyad.train.distributed.data_parallel import _wrapped
from dyad.train.distributed.world import World
from dyad.train.towers.build import build_model


def two_steps(wrapped: nn.Module) -> None:
    for _ in range(2):
        wrapped(torch.zeros(4, 3, 64, 64, dtype=torch.uint8)).sum().backward()
        wrapped.zero_grad()


def main() -> None:
    torch.set_warn_always(True)  # else a warning that ours caused and hid would be the only one of the process
    tower = build_model(compose_config(["experiment=emoji_scratch"])).towers.x_tower
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():  # what ours ignores
        two_steps(_wrapped(tower, World(0, 2)))
    print("plain", flush=True)
    two_steps(DistributedDataParallel(tower, gradient_as_bucket_view=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
