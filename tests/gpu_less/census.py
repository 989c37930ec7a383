"""A census of one training step on a pretended GPU: where the host waits, for every objective.

python -m tests.gpu_less.census prints the table of RESULTS.md: blocking reads, blocking copies and collectives of the
second step of 32 pairs in bf16; alone, and as rank 0 of 8 on torch's fake process group, each rank with the same rows
under ids and keys of its own, in four chunks. DDP is left out. With --json CASES it prints a line of JSON per case,
which the tests read.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from dyad.data.batch import Batch, Extra, KnownPositives, Noise, with_auxiliary
from dyad.data.config import AugmentConfig
from dyad.data.image_text.noise import add_noise
from dyad.data.image_text.transforms import NOISE_DRAWS, ImageSpec
from dyad.data.loading.sample_rng import uniforms
from dyad.plan.measure import only_rank_0
from dyad.train.config import OptimConfig, Precision, TrainConfig
from dyad.train.distributed import data_parallel
from dyad.train.distributed.world import World
from dyad.train.losses import OBJECTIVES, build_objective
from dyad.train.step import exchange_sizes
from dyad.train.step.loss_term import LossTerm
from dyad.train.step.step import TrainStep
from dyad.train.towers.image.pixels import NormalizePixels, PatchDropout
from dyad.train.towers.tower import TwoTower
from tests.gpu_less.pretend_cuda import GPU, answers, pretended
from tests.gpu_less.pretend_kernels import computed_kernels

PAIRS, SIDE = 32, 40  # SIDE: of views in pixels
WARPED = AugmentConfig(rotate=10, zoom=[0.8, 1.2], shift=0.1, gain=[0.7, 1.4], brightness=0.1, jitter=[0.4] * 4)
RECOLOURED = AugmentConfig(
    flip=0.5, jitter=[0.8, 0.8, 0.8, 0.2], jitter_prob=0.8, grey=0.2, blur=0.5, solarise=0.3, blur_sigma=[0.5, 2]
)
SAMPLES = 1000
PAIRED = [name for name, options in OBJECTIVES.items() if options.inputs == "pairs"]  # what a run can train
FURTHER = {"dpr", "epr", "cross_entropy", "listwise_ce"}  # trained with hard negatives


@dataclass(frozen=True)
class Case:
    """One objective and how it is trained. further: with hard negatives; known: and with listed positives. views:
    "alone" of two views of images with noise, "also": beside them an auxiliary loss of images and texts. plain: of
    pairs of texts, whose towers take less time."""

    objective: str
    precision: str = "fp32"
    chunk_size: int | None = None
    world_size: int = 1
    further: bool = False
    known: bool = False
    views: str = ""
    plain: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        options = "".join(f", {key}={value}" for key, value in self.options.items())
        more = f"{', hard negatives' * self.further}{', known positives' * self.known}"
        more += f", views {self.views}" if self.views else ""
        return f"{self.objective}{more}{options}"


@dataclass(frozen=True)
class Found:
    """The loss of the second step, the same on a CPU in fp32, what the host waited for, by line, and collectives."""

    loss: float
    loss_on_cpu: float
    reads: Mapping[str, int]
    copies: Mapping[str, int]
    collectives: Mapping[str, int]

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many blocking reads, blocking copies and collectives."""
        reads, copies, collectives = (sum(c.values()) for c in (self.reads, self.copies, self.collectives))
        return reads, copies, collectives


def table_cases(world_size: int) -> list[Case]:
    """The rows of the table, bf16; alone in one chunk, in a group in four."""
    how: dict[str, Any] = {"precision": "bf16", "world_size": world_size, "chunk_size": 8 if world_size > 1 else None}
    keyed = [Case("clip", options={"duplicates": which}, **how) for which in ("mask", "positive")]
    known = Case("dpr", further=True, known=True, **how)
    return [*(Case(name, further=name in FURTHER, **how) for name in PAIRED), known, *keyed]


class Image(nn.Module):
    """uint8 (b, 3, S, S) → (b, 16): patches of 4 × 4 pixels, of which half are dropped, and a projection."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.normalize = NormalizePixels(ImageSpec(size, (0.5, 0.4, 0.3), (0.3, 0.3, 0.2)))
        self.convolution, self.dropout = nn.Conv2d(3, 8, 4, 4), PatchDropout(0.5, 0)
        self.projection = nn.Linear(size * size // 4, 16)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.convolution(self.normalize(pixels)).flatten(2).transpose(1, 2)
        return self.projection(self.dropout(patches).flatten(1))


class Text(nn.Module):
    """int64 (b, L) → (b, 16): mean of embeddings, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.projection = nn.Embedding(100, 16), nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.projection(self.embedding(tokens).mean(1))


def batch(further: bool, known: bool, plain: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (PAIRS, 3, 8, 8), dtype=torch.uint8, generator=generator)
    tokens, more = (torch.randint(100, (n, 6), generator=generator) for n in (PAIRS, PAIRS // 2))
    ids = torch.arange(PAIRS)
    keys = ids + 7
    keys[1] = keys[0]  # one item twice
    pairs = Batch(tokens.flip(0) if plain else pixels, tokens, ids, ids + 7, keys)
    if further:
        rows = torch.arange(PAIRS // 2)
        pairs.extra = Extra(more, rows, rows + 1000, torch.zeros(len(rows), dtype=torch.bool))
    if known:
        pairs.known_positives = KnownPositives(torch.arange(4), torch.arange(4) + 9)
    return pairs


def views() -> Batch:
    """Two views of images, whose noise has all parts, and is still to be added."""
    generator, ids = torch.Generator().manual_seed(1), torch.arange(PAIRS)
    x, y = torch.randint(256, (2, PAIRS, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    draws = np.stack([uniforms(0, 0, i, 2 * NOISE_DRAWS) for i in range(PAIRS)])
    of_sides = zip((WARPED, RECOLOURED), np.split(draws, 2, 1), strict=True)
    x_noise, y_noise = (Noise(partial(add_noise, augment), own) for augment, own in of_sides)
    return Batch(x, y, ids, ids + 7, ids + 7, x_noise=x_noise, y_noise=y_noise)


def batch_of(case: Case) -> Batch:
    if case.views == "also":
        return with_auxiliary(views(), batch(False, False))
    return views() if case.views else batch(case.further, case.known, case.plain)


def moved(module: nn.Module, device: torch.device) -> Any:
    """module.to(device), which cannot change pretended parameters."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            part._parameters[name] = parameter if parameter is None else nn.Parameter(parameter.detach().to(device))
        part._buffers.update({name: buffer.to(device) for name, buffer in part._buffers.items() if buffer is not None})
    return module


def two_steps(case: Case, device: torch.device, precision: str, mode: Any = None) -> float:
    """Take two steps from the same weights for each device; return the loss of the second."""
    torch.manual_seed(0)
    options = dict(case.options)
    if hasattr(OBJECTIVES[case.objective], "num_samples"):
        options["num_samples"] = SAMPLES
    if hasattr(OBJECTIVES[case.objective], "gamma_epochs"):
        options["gamma_epochs"] = 30
    sides = (Image(SIDE), Image(SIDE)) if case.views else (Text() if case.plain else Image(), Text())
    towers = moved(TwoTower(*sides), device)
    objective = moved(build_objective(case.objective, **options), device)
    count = PAIRS * case.world_size
    chunks: dict[str, Any] = {"chunk_size": case.chunk_size, "keep_graphs": 1} if case.chunk_size else {}
    optim = OptimConfig(lr=1e-2, clip_norm=1.0)
    config = TrainConfig(seed=1, global_batch_size=count, optim=optim, precision=Precision(precision), **chunks)
    world, pairs = World(0, case.world_size, device), (PAIRS,) * case.world_size
    term = partial(LossTerm, config=config, total_steps=100, world=world, pairs=pairs)
    terms = [term(towers, objective)]
    if case.views == "also":
        towers, objective = moved(TwoTower(Image(), Text()), device), moved(build_objective("clip"), device)
        terms.append(term(towers, objective, name="pairs"))
    step = TrainStep(terms)
    state = step.state_dict()
    if state["scaler"]:
        step.load_state_dict({**state, "scaler": {**state["scaler"], "scale": 1.0}})  # no overflow, no skipped step
    step(batch_of(case), 0)
    if mode:
        mode.forget()
    return step(batch_of(case), 1)["loss"]


def run(case: Case) -> Found:
    """Count one case. Raises what a GPU would: an operation on tensors of two devices."""
    with rank_0_of(case.world_size):
        expected = two_steps(case, torch.device("cpu"), "fp32")
        with pretended() as mode, computed_kernels():
            loss = two_steps(case, GPU, case.precision, mode)
    return Found(loss, expected, dict(mode.reads), dict(mode.copies), dict(mode.collectives))


@contextmanager
def rank_0_of(world_size: int) -> Iterator[None]:
    """A group of ranks that hold the same rows under ids and keys of their own; the towers without DDP."""
    with (
        only_rank_0(world_size),
        patch.object(data_parallel, "wrap_towers", lambda towers, *_: (towers.x_tower, towers.y_tower)),
        patch.object(exchange_sizes.dist, "new_group", lambda **_: None),  # the hosts' own group is the pretended one
    ):
        yield


def counted(cases: list[Case], folder: Path) -> list[Found]:
    """Run the cases in one process with the stub of CUDA. Raises RuntimeError with its last lines if it fails."""
    lines = answers("tests.gpu_less.census", [asdict(case) for case in cases], folder)
    return [Found(**line) for line in lines]


def markdown() -> str:
    """The table of RESULTS.md."""
    columns = [f"{what}, W = {w}" for w in (1, 8) for what in ("reads", "copies", "collectives")]
    lines = [f"| objective | {' | '.join(columns)} |", "|---" * 7 + "|"]
    with tempfile.TemporaryDirectory() as folder:
        alone, of_eight = (counted(table_cases(w), Path(folder)) for w in (1, 8))
    for case, *both in zip(table_cases(1), alone, of_eight, strict=True):
        lines.append(f"| {case.name} | {' | '.join(str(n) for found in both for n in found.counts)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="cases, as JSON: the environment has the stub")
    given = parser.parse_args().json
    if given is None:
        print(markdown())
        return
    warnings.simplefilter("ignore")
    for case in json.loads(given):
        try:
            print(json.dumps(asdict(run(Case(**case)))), flush=True)
        except Exception as error:
            error.add_note(f"in {case}")
            raise


if __name__ == "__main__":
    main()
