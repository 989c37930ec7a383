"""What an objective takes for integers."""

from typing import Any

import pytest
import torch
from helpers.messages import raises

from dyad.train.losses import build_objective
from dyad.train.losses.gathered.arguments import as_int64


def test_an_empty_list_has_integers() -> None:
    """A rank without rows gives empty lists; one that refused them would let the others wait."""
    none: Any = []
    cpu = torch.device("cpu")
    for pairs, shape in ((False, (0,)), (True, (0, 2))):
        found = as_int64("positives", none, cpu, pairs=pairs)
        assert found is not None and found.dtype is torch.int64 and found.shape == shape
    x, y, objective = torch.randn(4, 8), torch.randn(4, 8), build_objective("clip")
    assert objective(x, y, torch.arange(4), excluded=none).loss == objective(x, y, torch.arange(4)).loss


@pytest.mark.parametrize("wrong", [torch.zeros(0), [0.5]], ids=str)
def test_floats_are_refused(wrong: Any) -> None:
    with raises(ValueError, "sample_ids", "float32"):
        as_int64("sample_ids", wrong, torch.device("cpu"))
