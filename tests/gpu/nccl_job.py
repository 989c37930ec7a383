"""Job for torchrun, on the GPUs of a machine (NCCL) or on CPUs (gloo): python tests/gpu/nccl_job.py [STEPS] [compiled]

The step on W ranks has the loss of one process with the whole batch, for equal, unequal and empty local batches; after
STEPS steps all ranks hold the same weights to the bit. compiled: towers under torch.compile, in chunks. Batch norms
over ranks have the gradients of one process, for the kernels of each layout.
"""

from __future__ import annotations

import hashlib
import sys

import torch
import torch.distributed as dist
from helpers.step import batch, dense_gradients, rows, snapshot, towers, train_step
from torch import nn

from dyad.train.config import BatchNorm
from dyad.train.distributed.world import World, gather_objects, init_world, shutdown
from dyad.train.losses import build_objective
from dyad.train.towers.batch_norm import set_batch_norms

B = 16


def check_batch_norm(world: World, shape: tuple[int, ...], layout: torch.memory_format, dtype: torch.dtype) -> None:
    """dtype: of the inputs, and of the weights, as FSDP2 gathers them; the running statistics are in float32."""
    torch.manual_seed(0)
    whole, upstream = (torch.randn(shape, device=world.device).to(dtype) for _ in range(2))
    whole, each = whole.contiguous(memory_format=layout), B // world.size
    rows_of = slice(world.rank * each, (world.rank + 1) * each)
    norm, plain = (nn.Sequential((nn.BatchNorm1d, nn.BatchNorm2d)[len(shape) // 4](shape[1])) for _ in range(2))
    norm, plain = norm.to(world.device), plain.to(world.device)
    set_batch_norms(norm, BatchNorm["global"])
    for parameter in norm.parameters():
        parameter.data = parameter.data.to(dtype)
    own, every = whole[rows_of].contiguous(memory_format=layout).requires_grad_(), whole.float().requires_grad_()
    (norm(own) * upstream[rows_of]).sum().backward()
    (plain(every) * upstream).sum().backward()
    assert own.grad is not None and every.grad is not None
    near = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(own.grad.float(), every.grad[rows_of], rtol=near, atol=near)
    for ours, wanted in zip(norm.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and wanted.grad is not None
        dist.all_reduce(total := ours.grad.float())
        torch.testing.assert_close(total, wanted.grad, rtol=near, atol=near * B)


def main() -> None:
    steps, compiled = int(sys.argv[1]) if sys.argv[1:] else 20, sys.argv[2:] == ["compiled"]
    world = init_world(60)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    for dtype in (torch.float32, torch.bfloat16):
        check_batch_norm(world, (B, 6), torch.contiguous_format, dtype)
        for layout in (torch.contiguous_format, torch.channels_last):
            check_batch_norm(world, (B, 6, 4, 4), layout, dtype)
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
