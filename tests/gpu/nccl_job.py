"""Job for torchrun, on the GPUs of a machine (NCCL) or on CPUs (gloo): python tests/gpu/nccl_job.py [STEPS] [compiled]

The step on W ranks has the loss of one process with the whole batch, for equal, unequal and empty local batches; after
STEPS steps all ranks hold the same weights to the bit. compiled: towers under torch.compile, in chunks.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from helpers.step import batch, dense_gradients, rows, snapshot, towers, train_step

from dyad.train.distributed.world import gather_objects, init_world, shutdown
from dyad.train.losses import build_objective

B = 16


def main() -> None:
    steps, compiled = int(sys.argv[1]) if sys.argv[1:] else 20, sys.argv[2:] == ["compiled"]
    world = init_world(60)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    whole, each = batch(B), B // world.size
    want, _ = dense_gradients(towers(), whole)
    unequal = [each] * world.size
    unequal[0], unequal[-1] = unequal[0] - 1, unequal[-1] + 1
    empty = [0, *[each] * (world.size - 2), 2 * each]
    for sizes in ([each] * world.size, unequal, empty):
        start = sum(sizes[: world.rank])
        own = rows(whole, start, start + sizes[world.rank])
        objective = build_objective("clip").to(world.device)
        step = train_step(towers().to(world.device), B, world=world, objective=objective, compile=compiled)
        assert abs(step(own, 0)["loss"] - want.item()) < 1e-7 * want.item(), sizes
    objective = build_objective("clip").to(world.device)
    more = {"compile": True, "chunk_size": max(1, each // 2)} if compiled else {}
    step = train_step(towers().float().to(world.device), B, world=world, objective=objective, **more)
    own = rows(whole, world.rank * each, (world.rank + 1) * each)
    own.x, own.y = own.x.float(), own.y.float()
    for i in range(steps):
        step(own, i)
    weights = b"".join(t.cpu().contiguous().numpy().tobytes() for t in snapshot(step).values())
    assert len(set(gather_objects(hashlib.sha256(weights).hexdigest(), world))) == 1, "ranks hold different weights"
    print("all checks hold", flush=True)
    shutdown(world)


if __name__ == "__main__":
    main()
