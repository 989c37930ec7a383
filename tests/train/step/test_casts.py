"""Under autocast each trained weight is cast once a step, however many chunks there are and however often they run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from helpers.step import gradients_of, same_bits, train_step
from helpers.towers import random_images, transformers_folder, transformers_tower, with_text
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dyad.data.batch import Batch
from dyad.train.config import Precision
from dyad.train.step.step import TrainStep
from dyad.train.towers.build import build_image_text

PAIRS = 16


class Casts(TorchDispatchMode):
    """Counts the conversions of each parameter to another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[Tensor] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
            self.of[args[0]] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return transformers_folder(tmp_path_factory.mktemp("model"), "bert")


def step_and_batch(name: str, chunk_size: int, **options: Any) -> tuple[TrainStep, Batch]:
    torch.manual_seed(0)
    text = transformers_tower(name)
    checkpointing = options.pop("grad_checkpointing", False)
    model = build_image_text(with_text(text, grad_checkpointing=checkpointing))
    ids = torch.arange(PAIRS)
    batch = Batch(
        random_images(PAIRS, 16), model.tokenize([f"a word {'more ' * i}" for i in range(PAIRS)]), ids, ids, ids
    )
    return train_step(model.towers, PAIRS, chunk_size=chunk_size, precision=Precision.bf16, **options), batch


@pytest.mark.parametrize("keep_graphs", [1, None])
@pytest.mark.parametrize("chunks", [1, 4, 16])
def test_each_trained_weight_is_cast_once_a_step(folder: str, chunks: int, keep_graphs: int | None) -> None:
    step, batch = step_and_batch(folder, PAIRS // chunks, keep_graphs=keep_graphs)
    for index in range(2):
        with Casts() as casts:
            step(batch, index)
        linear = {m for m in step.towers.modules() if isinstance(m, nn.Linear | nn.Conv2d)}
        assert {id(m.weight) for m in linear} <= {id(p) for p in casts.of}
        assert {count for weight, count in casts.of.items() if weight.requires_grad} == {1}


def test_a_weight_is_cast_anew_after_the_optimiser_has_moved_it(folder: str) -> None:
    step, batch = step_and_batch(folder, 4)
    first = step(batch, 0)["loss"]
    assert step(batch, 1)["loss"] != first
    assert not torch.is_autocast_enabled("cpu")


def test_recomputed_activations_get_the_same_gradient(folder: str) -> None:
    """Checkpointing runs layers again within backward, where the casts of the forward are still at hand."""
    found = []
    for checkpointing in (False, True):
        step, batch = step_and_batch(folder, 4, keep_graphs=1, grad_checkpointing=checkpointing)
        step(batch, 0)
        found.append(gradients_of(step))
    assert same_bits(*found)
