"""FLOPs of a step, peaks of GPUs, and what a run records of its device."""

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from helpers.tiny_runs import records, state
from torch import nn

from dyad.data.batch import PADDING, Batch
from dyad.train.config import ModelConfig, Pooling, Precision
from dyad.train.distributed.world import World
from dyad.train.gpus import gpu_figures
from dyad.train.monitor.stragglers import LocalTimer
from dyad.train.monitor.telemetry import Telemetry, peak_tflops, row_flops, step_flops
from dyad.train.towers.batch_norm import set_batch_norms
from dyad.train.towers.text.pooled import Pooled
from dyad.train.towers.tower import Tower, TwoTower


def linear(width: int) -> Tower:
    return Tower(nn.Linear(8, width), nn.Linear(width, 4))


def test_vit_b_32_needs_what_the_literature_says() -> None:
    """14.78 GFLOP forward and 29.44 backward per pair, 0.12 of which are scores that flash attention computes again."""
    with torch.device("meta"):
        model: Any = open_clip.create_model("ViT-B-32", force_custom_text=True, device="meta")
    image = row_flops(Tower(model.visual, nn.Identity()), torch.empty(3, 3, 224, 224, device="meta"))
    text = row_flops(Tower(model.text, nn.Identity()), torch.empty(3, 77, dtype=torch.int64, device="meta"))
    assert (image[0] / 1e9, text[0] / 1e9) == pytest.approx((8.82, 5.96), abs=0.005)
    assert (image[0] + text[0]) / 1e9 == pytest.approx(14.78, abs=0.005)
    assert (image[1] + text[1]) / 1e9 == pytest.approx(29.44 - 0.12, abs=0.005)


def test_a_linear_layer_by_hand_and_what_is_frozen() -> None:
    rows = torch.zeros(5, 8)
    assert row_flops(linear(16), rows) == (2 * 8 * 16 + 2 * 16 * 4, 2 * 8 * 16 + 2 * 2 * 16 * 4)
    for cache_mb, trunk in ((0, 2 * 8 * 16), (1, 0)):  # a cache saves the trunk
        net = nn.Linear(8, 16).requires_grad_(False)
        tower = Tower(net, nn.Linear(16, 4), cache_mb=cache_mb)
        assert row_flops(tower, rows) == (trunk + 2 * 16 * 4, 2 * 16 * 4)


def test_texts_count_at_their_mean_length() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(9, 8), nn.Linear(8, 8)

        def forward(self, input_ids: torch.Tensor) -> object:
            return type("Out", (), {"last_hidden_state": self.layer(self.table(input_ids))})

    tokens = torch.full((4, 32), PADDING)
    tokens[:2, :8], tokens[2:, :24] = 1, 1
    tower = Tower(Pooled(Encoder(), Pooling.mean, pad=0), nn.Identity())
    assert row_flops(tower, tokens)[0] == 16 * 2 * 8 * 8


def test_counting_leaves_the_towers_as_they_are() -> None:
    norm = nn.BatchNorm1d(8)
    tower = Tower(nn.Sequential(nn.Linear(8, 8), norm, nn.Dropout(0.5)), nn.Linear(8, 4))
    towers = TwoTower(tower, tower).train()
    set_batch_norms(towers, ModelConfig().batch_norm)
    before, dice = {name: t.clone() for name, t in tower.state_dict().items()}, torch.get_rng_state()
    ids = torch.arange(3)
    batch = Batch(torch.ones(3, 8), torch.ones(3, 8), ids, ids, ids)
    assert step_flops(towers, batch) == 6 * sum(row_flops(tower, batch.x)) > 0
    assert all(torch.equal(t, before[name]) for name, t in tower.state_dict().items())
    assert all(p.grad is None for p in tower.parameters())
    assert all(module.training for module in tower.modules()) and torch.equal(dice, torch.get_rng_state())


def test_a_compiled_tower_is_counted_without_compiling() -> None:
    tower = linear(16)
    tower.compile(backend=lambda *_: pytest.fail("compiled"))
    assert row_flops(tower, torch.zeros(2, 8)) == row_flops(linear(16), torch.zeros(2, 8))


def test_a_tower_that_cannot_be_counted_ends_nothing() -> None:
    class Odd(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(rows) * float(rows.sum().item() == 0)

    towers, ids = TwoTower(Tower(Odd(8, 4), nn.Identity()), linear(16)), torch.arange(2)
    batch = Batch(torch.zeros(2, 8), torch.zeros(2, 8), ids, ids, ids)
    telemetry = Telemetry(towers, Precision.fp32, LocalTimer(torch.device("cpu")), World())
    assert telemetry(batch, 1, 0.5).keys() == {"peak_rss_gib"}


@pytest.mark.parametrize(
    ("name", "half", "tf32", "link"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 494.7, 450),
        ("NVIDIA H100 PCIe", 756, 378, 64),
        ("NVIDIA H200", 989.4, 494.7, 450),
        ("NVIDIA A100-SXM4-80GB", 312, 156, 300),
        ("NVIDIA A100-PCIE-40GB", 312, 156, 32),
        ("NVIDIA A100 80GB PCIe", 312, 156, 32),
        ("Tesla V100-SXM2-32GB", 125, 15.7, 150),
        ("Tesla V100-PCIE-16GB", 112, 14, 16),
        ("NVIDIA L40S", 362, 183, 32),
        ("NVIDIA B200", 2250, 1125, 900),
        ("NVIDIA GB200", 2500, 1250, 900),
        ("NVIDIA GH200 480GB", 989.4, 494.7, 450),
        ("NVIDIA RTX A1000", None, None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None, None),
        ("NVIDIA GeForce GTX 1080", None, None, None),
    ],
)
def test_figures_are_those_of_the_gpu(name: str, half: float | None, tf32: float | None, link: float | None) -> None:
    assert [peak_tflops(name, p) for p in (Precision.bf16, Precision.fp16, Precision.fp32)] == [half, half, tf32]
    assert gpu_figures(name).link == link


def test_a_run_records_its_device(commands, tiny, tmp_path: Path) -> None:
    keys = {"run.name": "a", "steps": 8, "tracking.every": 2, "profile": 2, "global_batch_size": 32}
    first, second = commands.world(2, *tiny(keys))
    assert (first.code, second.code) == (0, 0), first.out
    run = tmp_path / "runs" / "a"
    assert state(run)["status"] == "finished"
    lines = [r for r in records(run) if "train/loss" in r]
    assert all(0.1 < r["train/peak_rss_gib"] < 100 for r in lines)
    rates = [r["train/tflops_per_second_per_device"] * r["train/batch_time"] for r in lines]
    assert rates == pytest.approx([rates[0]] * 5) and 1e-6 < rates[0] < 1e-2
    assert not any("train/mfu" in r or "train/copy_time" in r for r in lines)  # no GPU
    (profiled,) = [r for r in lines if "train/outside_towers" in r]
    assert profiled["step"] == 6 and 0 < profiled["train/outside_towers"] < 1
    assert 0 < profiled["train/exposed_comm_time"] < 10
    made = sorted(path.name for path in (run / "profile").iterdir())
    assert made == [f"{kind}_rank{r}.{end}" for kind, end in (("summary", "txt"), ("trace", "json.gz")) for r in (0, 1)]
    table = (run / "profile/summary_rank0.txt").read_text()
    assert all(f"\n{part}" in f"\n{table}" for part in ("towers, forward ", "objective ", "a step ", "outside_towers "))
    assert "aten::" in table and "Self CPU" in table
    assert first.out.count("of a step is outside the towers") == 1 and "https://ui.perfetto.dev" in first.out
    assert "ERROR" not in first.out and second.out == ""


@pytest.mark.gpu
def test_a_gpu_has_peak_copies_and_utilisation() -> None:
    device = torch.device("cuda")
    towers, ids = TwoTower(linear(4096), linear(4096)).to(device), torch.arange(4096)
    batch = Batch(torch.zeros(4096, 8), torch.zeros(4096, 8), ids, ids, ids)
    timer = LocalTimer(device)
    timer.start()
    on_device = batch.to(device)
    towers.x_tower(on_device.x).sum().backward()
    timer.stop()
    torch.cuda.synchronize()
    telemetry = Telemetry(towers, Precision.bf16, timer, World(device=device))
    found = telemetry(batch, 1, 0.5)
    assert 0.05 < found["peak_gpu_gib"] < 10 and 0 < found["copy_time"] < 10
    assert found["tflops_per_second_per_device"] == pytest.approx(step_flops(towers, batch) / 0.5e12)
    if peak := peak_tflops(torch.cuda.get_device_name(), Precision.bf16):
        assert found["mfu"] == pytest.approx(found["tflops_per_second_per_device"] / peak)
