"""Job for torchrun or one process: counts what each objective reads, copies and sends in one step of small towers.

Prints one JSON object on rank 0: case → {"reads", "copies", "collectives"}, each place → how often. Cases are an
objective with its options; "+ negatives": with hard negatives, "+ known": with known positives, "+ chunks": in chunks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from helpers.host_reads import counted_host_reads
from helpers.step import batch, rows, towers, train_step, with_extra

from dyad.data.batch import KnownPositives
from dyad.train.distributed.world import World, init_world, shutdown
from dyad.train.losses import build_objective

B = 16
SAMPLES = {"num_samples": 100, "gamma": 0.8}
MASK = {"duplicates": "mask"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "clip": ("clip", {}),
    "clip + chunks": ("clip", {}),
    "symmetric_dpm": ("symmetric_dpm", {}),
    "siglip": ("siglip", {}),
    "siglip + chunks": ("siglip", {}),
    "dpr + negatives": ("dpr", {}),
    "dpr + negatives + chunks": ("dpr", {}),
    "clip, mask": ("clip", MASK),
    "siglip, mask": ("siglip", MASK),
    "dpr, mask + negatives": ("dpr", MASK),
    "dpr, mask + negatives + known": ("dpr", MASK),
    "sogclr": ("sogclr", SAMPLES),
    "fastclip_v3": ("fastclip_v3", SAMPLES),
    "fastclip_v3 + chunks": ("fastclip_v3", SAMPLES),
    "isogclr": ("isogclr", SAMPLES),
    "nuclr": ("nuclr", SAMPLES),
    "nuclr + chunks": ("nuclr", SAMPLES),
}


def count(case: str, world: World) -> dict[str, dict[str, int]]:
    """Count the second step: the first makes buffers and optimiser state."""
    name, options = CASES[case]
    pairs = tuple(B // world.size for _ in range(world.size))
    step = train_step(
        towers(),
        B,
        world=world,
        objective=build_objective(name, **options),
        chunk_size=3 if "+ chunks" in case else None,
        pairs=pairs,
    )
    whole = batch(B)
    if "+ negatives" in case:
        whole = with_extra(whole, [(i * 5) % 4 for i in range(B)])
    own = rows(whole, world.rank * pairs[0], (world.rank + 1) * pairs[0])
    if own.extra is not None:
        own.extra = replace(own.extra, positive=torch.zeros_like(own.extra.positive), positives=0)
    if "+ known" in case:  # of each row its own item and that of another row
        row = torch.arange(pairs[0]).repeat_interleave(2)
        own = replace(
            own, known_positives=KnownPositives(row, whole.y_keys[(row * 3 + torch.arange(len(row)) % 2) % B])
        )
    step(own, 0)
    with counted_host_reads() as found:
        step(own, 1)
    return {kind: dict(counts) for kind, counts in vars(found).items()}


def main() -> None:
    torch.manual_seed(0)
    world = init_world(60, cpu=True)
    found = {case: count(case, world) for case in CASES}
    if world.rank == 0:
        print(json.dumps(found))
    shutdown(world)


if __name__ == "__main__":
    main()
