"""Job for torchrun: sharded towers (fsdp2, hsdp) train as those of ddp, and each rank holds its share.

Arguments: "losses" and a number of steps: in float32, of four objectives, and of towers with chunks, recomputed
activations, frozen weights, adapters and a target: losses to 1e-5. "state": shares of weights and moments, collectives
of a step, and checkpoints that any layout reads. "compiled" and a number: layers through torch.compile, in so many
cases of COMPILED.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from helpers.step import batch, train_step, with_extra, with_wrong_x
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as recomputed

from dyad.eval.encode.embeddings import identity_of
from dyad.train.config import DistConfig, OptimConfig, Parallel, TargetConfig, TargetKind
from dyad.train.distributed.sharded_tensors import local
from dyad.train.distributed.world import World, broadcast_object, init_world, shutdown
from dyad.train.losses import build_objective
from dyad.train.run_folder.checkpoint import Checkpoint
from dyad.train.run_folder.checkpoint_state import capture, restore
from dyad.train.run_folder.saving import write_checkpoint
from dyad.train.step.step import TrainStep
from dyad.train.towers.tower import Tower, TwoTower
from jobs.dist_step import own

B, WIDTH = 16, 64
SIZES = {2: (9, 7), 4: (5, 0, 4, 7)}
PER_ROW = [0, 2, 1, 0, 0, 3, 1, 1, 0, 0, 2, 0, 1, 1, 0, 0]


# objective, model, options of the step
COMPILED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dpr", {"recompute": True, "frozen": "trunk"}, {"chunk_size": 5}),
    ("siglip", {}, {}),
    ("clip", {}, {"chunk_size": 3}),
    ("fastclip_v3", {"rank": 2}, {}),
]


class Layer(nn.Module):
    """A linear layer, with adapters beside its frozen weights if `rank` is above 0, and dropout of nothing."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear, self.norm, self.rank = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), rank
        if rank:
            self.linear.requires_grad_(False)
            self.a, self.b = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)) + (self.b(self.a(x)) if self.rank else 0.0))


class Layers(nn.Module):
    def __init__(self, recompute: bool, rank: int) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(6, WIDTH), nn.ModuleList(Layer(rank) for _ in range(3))
        self.recompute = recompute

    def forward(self, rows: Tensor) -> Tensor:
        x = self.first(rows)
        for layer in self.layers:
            x = recomputed(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def model(recompute: bool = False, rank: int = 0, frozen: str = "", shared: bool = False) -> TwoTower:
    torch.manual_seed(0)
    trunks = [Layers(recompute, rank) for _ in range(2)]
    if frozen:
        trunks[0].requires_grad_(False)
    towers = [Tower(trunk, nn.Linear(WIDTH, 8)) for trunk in trunks]
    if frozen == "whole":
        towers[0].requires_grad_(False)
    return TwoTower(towers[0], towers[0] if shared else towers[1])


def layouts(world: World) -> dict[str, DistConfig]:
    found = {"ddp": DistConfig(), "fsdp2": DistConfig(name=Parallel.fsdp2)}
    return found | ({"hsdp": DistConfig(name=Parallel.hsdp, shard_size=2)} if world.size > 2 else {})


def steps(name: str, dist: DistConfig, world: World, of: dict[str, Any], count: int, **options: Any) -> list[float]:
    per_sample = {"num_samples": 4 * B, "gamma": 0.8} if name == "fastclip_v3" else {}
    objective = build_objective(name, **per_sample)
    step = train_step(
        model(**of),
        B,
        world=world,
        objective=objective,
        optim=OptimConfig(lr=1e-3, clip_norm=1.0),
        dist=dist,
        **options,
    )
    found = []
    for index in range(count):
        whole = batch(B, index, torch.float32)
        whole = {"dpr": with_extra, "clip": with_wrong_x}.get(name, lambda same, _: same)(whole, PER_ROW)
        scalars = step(own(whole, SIZES[world.size], world.rank), index)
        found += [scalars["loss"], scalars["grad_norm"]]
    return found


def check_losses(world: World, count: int) -> None:
    target = {"target": TargetConfig(TargetKind.ema, momentum=0.9)}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("clip", {}, {}),
        ("siglip", {"recompute": True}, {"chunk_size": 2}),
        ("fastclip_v3", {"rank": 2}, {"chunk_size": 3}),
        ("dpr", {"shared": True}, {"chunk_size": 2}),
        ("clip", {"recompute": True, "rank": 2}, {}),
        ("clip", {"frozen": "trunk", "recompute": True}, {"chunk_size": 2}),
        ("clip", {"frozen": "whole"}, {}),
        ("spectral_alternating", {"shared": True}, target),
    ]
    for name, of, options in cases:
        found = {kind: steps(name, dist, world, of, count, **options) for kind, dist in layouts(world).items()}
        for kind, values in found.items():
            for ours, wanted in zip(values, found["ddp"], strict=True):
                assert abs(ours - wanted) <= 1e-5 * max(1, abs(wanted)), (name, of, options, kind, ours, wanted)


class Scattered(TorchDispatchMode):
    """Counts the reduce-scatters of a block. torch's own counter fails in torch 2.11 where layers are recomputed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def one_step(dist: DistConfig, world: World, index: int = 0, step: TrainStep | None = None) -> TrainStep:
    step = step or train_step(model(), B, world=world, optim=OptimConfig(lr=1e-3, ema=0.5), dist=dist, chunk_size=2)
    step(own(batch(B, index, torch.float32), SIZES[world.size], world.rank), index)
    return step


def check_share(world: World) -> None:
    for kind, dist in layouts(world).items():
        untrained = train_step(model(), B, world=world, dist=dist)
        assert identity_of(untrained.towers.y_tower) == identity_of(model().y_tower), kind
        step = one_step(dist, world)
        shards = {"ddp": 1, "fsdp2": world.size, "hsdp": 2}[kind]
        weights = sum(p.numel() for p in step.towers.parameters())
        moments = [t for slot in step.optimizer.state.values() for t in slot.values() if t.dim()]
        held = sum(local(p).numel() for p in step.towers.parameters())
        assert abs(held * shards / weights - 1) < 0.05, (kind, held, weights)
        assert abs(sum(local(t).numel() for t in moments) * shards / (2 * weights) - 1) < 0.05, kind
        with Scattered() as scattered:
            one_step(dist, world, 1, step)
        if kind != "ddp":  # each layer and each root once, in the last backward, whatever the chunks
            objective = 1  # the gradient of y's columns
            assert scattered.count - objective == 2 * (3 + 1), (kind, scattered.count)


def check_checkpoints(world: World, folder: Path) -> None:
    """A checkpoint of each layout, read by each, goes on as it would itself."""
    for source, dist in layouts(world).items():
        first = one_step(dist, world)
        modules = {"towers": first.towers, "objective": first.objective}
        shards = {"ddp": 1, "fsdp2": world.size, "hsdp": 2}[source]
        part = None if shards == 1 else (world.rank, shards, "attempt")
        state = capture(modules, first.optimizer, 1, {}, average=first.average.tensors, part=part)
        if world.rank < shards:
            write_checkpoint(folder / source, state, keep=1, wait=30)
        broadcast_object(None, world)
        path = folder / source / "checkpoints/step_00000001"
        Checkpoint(path).verify()
        wanted = one_step(dist, world, 1, first).scalars["loss"]
        for kind, other in layouts(world).items():
            if world.size > 2 and "hsdp" not in (source, kind):
                continue  # as two processes check it
            second = train_step(model(), B, world=world, optim=OptimConfig(lr=1e-3, ema=0.5), dist=other, chunk_size=2)
            parts = {"towers": second.towers, "objective": second.objective}
            average, _ = restore(Checkpoint(path).read(), parts, second.optimizer)
            second.average.tensors = average
            got = one_step(other, world, 1, second).scalars["loss"]
            assert abs(got - wanted) < 1e-6, (source, kind, got, wanted)
            again = one_step(other, world, 2, second).scalars["loss"]
            assert again != got
        weights, plain = Checkpoint(path).weights(), model()
        assert {f"towers.{name}" for name in plain.state_dict()} <= set(weights)
        for name, tensor in plain.state_dict().items():
            assert weights[f"towers.{name}"].shape == weights.shape(f"towers.{name}") == tensor.shape


def main() -> None:
    torch.set_num_threads(1)
    world = init_world(timeout=60, cpu=True)
    if sys.argv[1] == "losses":
        check_losses(world, int(sys.argv[2]))
    elif sys.argv[1] == "compiled":
        inductor.compile_threads = 1  # else it starts processes, each of which imports torch
        for name, of, options in COMPILED[: int(sys.argv[2])]:
            fsdp2 = layouts(world)["fsdp2"]
            plain, compiled = (steps(name, fsdp2, world, of, 3, compile=c, **options) for c in (False, True))
            for one, other in zip(plain, compiled, strict=True):
                assert abs(one - other) <= 1e-5 * max(1, abs(one)), (name, of, options, plain, compiled)
    else:
        check_share(world)
        check_checkpoints(world, Path(broadcast_object(sys.argv[2], world)))
    print("all checks hold", flush=True)
    shutdown(world)


if __name__ == "__main__":
    main()
