"""Job for torchrun: ten steps in float32 with an ema target; arguments: plain, normed (batch norms), shared, in turn.

Rank 0 prints a line for each step: the loss, and every weight of the target after it. All ranks must have the same.
"""

from __future__ import annotations

import sys

import torch
from helpers.step import batch, same_bits, towers, train_step

from dyad.train.config import BatchNorm, OptimConfig, TargetConfig, TargetKind
from dyad.train.distributed.world import World, broadcast_object, init_world, shutdown
from dyad.train.losses import build_objective
from dyad.train.towers.batch_norm import set_batch_norms
from jobs.dist_step import own

B = 16
SIZES = {1: (16,), 2: (9, 7), 4: (5, 0, 4, 7)}


def run(kind: str, world: World) -> None:
    model = towers(normed=kind == "normed", shared=kind == "shared").float()
    set_batch_norms(model, BatchNorm["global"])
    if kind == "normed":  # the gradient of a bias before a batch norm is rounding alone, which AdamW makes large
        for tower in (model.x_tower, model.y_tower):
            tower.get_parameter("layers.0.bias").requires_grad_(False)
    step = train_step(
        model,
        B,
        world=world,
        objective=build_objective("spectral_alternating"),
        optim=OptimConfig(lr=1e-3),
        target=TargetConfig(TargetKind.ema, momentum=0.5),
        chunk_size=None if kind == "normed" else 3,
    )
    for index in range(10):
        scalars = step(own(batch(B, index, torch.float32), SIZES[world.size], world.rank), index)
        weights = {str(i): tensor.clone() for i, tensor in enumerate(step.target.tensors.values())}
        assert same_bits(broadcast_object(weights, world), weights)
        if world.rank == 0:
            flat = torch.cat([tensor.flatten() for tensor in weights.values()])
            print(scalars["loss"], *flat.tolist(), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    world = init_world(timeout=60, cpu=True)
    for kind in sys.argv[1:]:
        run(kind, world)
    shutdown(world)


if __name__ == "__main__":
    main()
