"""Training steps of towers sharded over pretended GPUs (dist=fsdp2, hsdp), as rank 0 of a fake process group.

python -m tests.gpu_less.sharded_steps --json CASES prints a line of JSON per case, which the tests read. The other
ranks are taken to hold what this one holds: a whole weight is the part of rank 0, again and again, and of a gradient's
sum, each term is that of rank 0. So the numbers mean little, but a CPU must come to the same in the same steps.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as recomputed

from dyad.data.batch import Batch
from dyad.plan.measure import join_uniform_ranks
from dyad.train.config import DistConfig, OptimConfig, Parallel, Precision, TrainConfig
from dyad.train.distributed.sharded_tensors import local
from dyad.train.distributed.world import World
from dyad.train.losses import build_objective
from dyad.train.step.loss_term import LossTerm
from dyad.train.step.step import TrainStep
from dyad.train.towers.tower import Tower, TwoTower
from tests.gpu_less.census import moved
from tests.gpu_less.pretend_cuda import GPU, answers, pretended
from tests.gpu_less.pretend_kernels import computed_kernels

PAIRS, TOKENS, WORDS, WIDTH, INNER, LAYERS = 8, 6, 1100, 32, 600, 2
STEPS = 2


@dataclass(frozen=True)
class Case:
    """How the towers are sharded and trained. shard_size: None: over all ranks. recompute: activations of layers.

    In a world of 64, too, some ranks have no row of the weights of WIDTH rows, and the rows of others are filled up.
    """

    objective: str
    world_size: int = 64
    shard_size: int | None = None
    precision: str = "fp32"
    chunk_size: int | None = None
    recompute: bool = False


@dataclass(frozen=True)
class Held:
    """A tensor of the training state: whether it is sharded, where this rank's part is, and how many rows it has."""

    sharded: bool
    device: str
    rows: int
    own_rows: int


@dataclass(frozen=True)
class Found:
    """Loss and norm of the gradient of every step, the same on a CPU in fp32, and what rank 0 holds after the last.

    held: every weight of the towers by name, also its average and AdamW's two moments. reads, copies, collectives: of
    the last step, as in census.py.
    """

    scalars: list[float]
    scalars_on_cpu: list[float]
    held: dict[str, Held]
    reads: dict[str, int]
    copies: dict[str, int]
    collectives: dict[str, int]


class Layer(nn.Module):
    """A layer of a transformer: attention of one head, then two linear layers, each beside what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(F.layer_norm(x, [WIDTH])).chunk(3, dim=-1)
        x = x + (q @ k.mT / WIDTH**0.5).softmax(-1) @ v
        return x + self.down(F.gelu(self.up(x)))


class Trunk(nn.Module):
    """int64 (b, L) → (b, WIDTH). The positions are a buffer, which is not sharded but must be on the device as well."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.words, self.recompute = nn.Embedding(WORDS, WIDTH), recompute
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.register_buffer("positions", torch.linspace(-1, 1, TOKENS)[:, None].repeat(1, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = x + self.positions.to(x.dtype)
        for layer in self.layers:
            x = recomputed(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x.mean(1)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(WORDS, (PAIRS, TOKENS), generator=generator) for _ in range(2))
    ids = torch.arange(PAIRS)
    return Batch(x, y, ids, ids + 7, ids + 7)


def towers(recompute: bool) -> TwoTower:
    """Two towers on the host: what is sharded is moved to its device by `shard`."""
    torch.manual_seed(0)
    found = TwoTower(*(Tower(Trunk(recompute), nn.LayerNorm(WIDTH, bias=False)) for _ in range(2)))
    for layer in found.modules():
        if isinstance(layer, nn.Linear):  # rows are equal, so what they add grows with their number
            nn.init.normal_(layer.weight, std=0.01)
    return found


def train(case: Case, device: torch.device, precision: str, mode: Any = None) -> tuple[TrainStep, list[float]]:
    """Take the steps; return what took them, and loss and norm of the gradient of each."""
    config = TrainConfig(
        seed=1,
        global_batch_size=PAIRS * case.world_size,
        chunk_size=case.chunk_size,
        precision=Precision(precision),
        optim=OptimConfig(lr=1e-3, clip_norm=1.0, ema=0.5),
        dist=DistConfig(name=Parallel.hsdp if case.shard_size else Parallel.fsdp2, shard_size=case.shard_size),
    )
    objective = moved(build_objective(case.objective), device)
    pairs, world = (PAIRS,) * case.world_size, World(0, case.world_size, device)
    step = TrainStep([LossTerm(towers(case.recompute), objective, config, 100, world, pairs)])
    scalars: list[float] = []
    for index in range(STEPS):
        if mode:
            mode.forget()
        found = step(batch(), index)
        scalars += [found["loss"], found["grad_norm"]]
    return step, scalars


def held(step: TrainStep) -> dict[str, Held]:
    found: dict[str, Held] = {}
    for name, parameter in step.towers.named_parameters():
        state = step.optimizer.state[parameter]
        tensors = {"": parameter, " average": step.average.tensors[parameter]}
        for what, tensor in (tensors | {f" {key}": state[key] for key in ("exp_avg", "exp_avg_sq")}).items():
            part = local(tensor)
            found[name + what] = Held(isinstance(tensor, DTensor), str(part.device), len(tensor), len(part))
    return found


def run(case: Case) -> Found:
    """Take the steps of one case. Raises what a GPU would: an operation on tensors of two devices."""
    join_uniform_ranks(case.world_size, GPU)
    try:
        _, expected = train(case, torch.device("cpu"), "fp32")
        with pretended() as mode, computed_kernels():
            step, scalars = train(case, GPU, case.precision, mode)
            return Found(scalars, expected, held(step), dict(mode.reads), dict(mode.copies), dict(mode.collectives))
    finally:
        dist.destroy_process_group()


def results(cases: list[Case], folder: Path) -> list[Found]:
    """Run the cases in one process with the stub of CUDA. Raises RuntimeError with its last lines if it fails."""
    lines = answers("tests.gpu_less.sharded_steps", [asdict(case) for case in cases], folder)
    return [Found(**{**line, "held": {name: Held(**held) for name, held in line["held"].items()}}) for line in lines]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for given in json.loads(sys.argv[2]):
        print(json.dumps(asdict(run(Case(**given)))), flush=True)
