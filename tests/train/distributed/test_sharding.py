"""Sharded towers: jobs of two and four processes (tests/jobs/dist_sharded.py), the layers found, and clear refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import tiny_decoder
from helpers.dist import launch
from helpers.messages import raises
from torch import nn

from dyad.data.base.errors import ConfigError
from dyad.train.config import DistConfig, OptimConfig, Parallel, Precision, TrainConfig
from dyad.train.config_rules import check_values
from dyad.train.distributed.sharding import describe_layers, shard_size
from dyad.train.towers.layers import layers_of
from dyad.train.towers.tower import TwoTower

SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("world_size", "steps"), [(2, 2), pytest.param(2, 50, marks=SOAK), pytest.param(4, 50, marks=SOAK)]
)
def test_losses_are_those_of_ddp(world_size: int, steps: int) -> None:
    launch("dist_sharded.py", world_size, "losses", str(steps))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=SOAK)])
def test_shares_collectives_and_checkpoints(world_size: int, tmp_path: Path) -> None:
    launch("dist_sharded.py", world_size, "state", str(tmp_path))


def test_an_abort_ends_what_waits_in_a_group_of_the_mesh() -> None:
    launch("dist_mesh.py", 4)


@pytest.mark.linux
def test_no_rank_holds_all_weights_of_a_model_in_files(tmp_path: Path) -> None:
    tiny_decoder.write(tmp_path / "small")
    tiny_decoder.write(tmp_path / "large", width=512, layers=8)  # 32 million weights
    launch("dist_from_files.py", 2, str(tmp_path / "small"), str(tmp_path / "large"))


@pytest.mark.compiler
@pytest.mark.parametrize("cases", [1, pytest.param(4, marks=SOAK)])
def test_compiled_layers(cases: int) -> None:
    launch("dist_sharded.py", 2, "compiled", str(cases))


def test_layers_are_members_of_lists_of_one_class() -> None:
    inner = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Sequential(nn.Linear(2, 2), nn.Tanh())])
    tower = nn.Sequential(nn.Embedding(3, 2), nn.ModuleDict({"layers": inner}), nn.Sequential(nn.Tanh(), nn.Tanh()))
    assert list(layers_of(tower)) == list(inner)


class Named(nn.Module):
    """Blocks that are attributes, beside another module."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.start = nn.Embedding(3, 2)
        for i in range(blocks):
            setattr(self, f"block_{i}", nn.TransformerEncoderLayer(4, 1, 8))
        self.end = nn.Linear(4, 4)


def test_blocks_with_names_in_dictionaries_and_beside_another_module_are_layers() -> None:
    blocks = [nn.TransformerEncoderLayer(4, 1, 8) for _ in range(3)]
    for tower in (
        nn.ModuleDict({"start": nn.Embedding(3, 2), **{f"block_{i}": block for i, block in enumerate(blocks)}}),
        nn.Sequential(nn.Embedding(3, 2), nn.Sequential(*blocks, nn.LayerNorm(4))),
    ):
        assert list(layers_of(tower)) == blocks
    assert [type(layer) for layer in layers_of(Named(2))] == [nn.TransformerEncoderLayer] * 2
    lines = list(describe_layers(TwoTower(Named(2), Named(1)), 2))
    assert "2 layers" in lines[0] and "warning" in lines[1] and "y tower" in lines[1]


@pytest.mark.parametrize(
    ("name", "size", "environment", "wanted"),
    [
        ("ddp", None, None, 1),
        ("fsdp2", None, None, 8),
        ("hsdp", None, "4", 4),
        ("hsdp", 2, "4", 2),
        ("fsdp2", 2, None, 2),
    ],
)
def test_size_of_a_shard(
    name: str, size: int | None, environment: str | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", environment)
    assert shard_size(DistConfig(name=Parallel[name], shard_size=size), 8) == wanted


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"dist": DistConfig(name=Parallel.ddp, shard_size=2)}, "dist.shard_size=2"),
        ({"dist": DistConfig(name=Parallel.fsdp2), "precision": Precision.fp16}, "precision=bf16"),
        ({"dist": DistConfig(name=Parallel.hsdp), "also": {"a": "task=views"}}, "also"),
        ({"dist": DistConfig(name=Parallel.fsdp2), "optim": OptimConfig(name="lion")}, "optim.name=adamw"),
    ],
)
def test_refusals(config: dict[str, object], named: str) -> None:
    with raises(ConfigError, named):
        check_values(TrainConfig(**config))  # type: ignore[arg-type]


def test_a_shard_size_that_does_not_divide_the_processes() -> None:
    with raises(ConfigError, "dist.shard_size=3", "1, 2, 4, 8"):
        shard_size(DistConfig(name=Parallel.fsdp2, shard_size=3), 8)
