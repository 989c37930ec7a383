"""Towers on a GPU never make the host wait: shown without a GPU, by fake CUDA tensors, which have no values to read."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.messages import raises
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel

from dyad.train.config import Pooling
from dyad.train.towers.frozen_cache import FrozenCache
from dyad.train.towers.text.pooled import Pooled
from dyad.train.towers.tower import Tower

pytestmark = pytest.mark.fake_gpu
BERT: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)


class NoCopyToTheHost(TorchDispatchMode):
    """Refuses results on the CPU of what is on CUDA."""

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        on_gpu = [a for a in args if isinstance(a, Tensor) and a.device.type == "cuda"]
        assert not (on_gpu and isinstance(result, Tensor) and result.device.type == "cpu"), function
        return result


@pytest.fixture
def fake_gpu() -> Iterator[None]:
    with FakeTensorMode(), torch.device("cuda"), NoCopyToTheHost():
        yield


def frozen_images(cache_mb: int | None) -> Tower:
    return Tower(
        nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.Flatten()).requires_grad_(False),
        nn.Linear(64, 2),
        cache_mb=cache_mb,
    )


@pytest.mark.parametrize("cache_mb", [0, None])
def test_a_frozen_tower_without_cache_copies_nothing_to_the_host(fake_gpu: None, cache_mb: int | None) -> None:
    pixels = torch.zeros(300, 3, 16, 16)
    assert frozen_images(cache_mb)(pixels).shape == (300, 2)


def test_a_cache_does(fake_gpu: None) -> None:
    with raises(AssertionError, "aten._to_copy"):
        FrozenCache(1 << 20)(frozen_images(0).features, torch.zeros(300, 3, 16, 16), lambda: None, None)


@pytest.mark.parametrize("frozen", [False, True])
def test_texts_with_known_lengths(fake_gpu: None, frozen: bool) -> None:
    encoder = BertModel(BertConfig(**BERT)).requires_grad_(not frozen)
    tower = Tower(Pooled(encoder, Pooling.mean, 0), nn.Linear(32, 2), cache_mb=None)
    tokens = torch.zeros(1100, 64, dtype=torch.int64)
    assert tower(tokens, np.arange(1100) % 64 + 1).shape == (1100, 2)


def test_texts_without_lengths_are_read(fake_gpu: None) -> None:
    tower = Tower(Pooled(BertModel(BertConfig(**BERT)), Pooling.mean, 0), nn.Linear(32, 2))
    with raises(AssertionError, "aten._to_copy"):
        tower(torch.zeros(4, 64, dtype=torch.int64))
