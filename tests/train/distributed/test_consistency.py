"""Digests of weights and code in one process. Several ranks: tests/faults/test_detection.py."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dyad.train.distributed import consistency as digest
from dyad.train.distributed.consistency import bit_sum, code_digest, minority_ranks


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    whole = torch.randint(1, 100, shape, generator=torch.Generator().manual_seed(0))
    return whole.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5, 2), (0,)])
def test_one_bit_anywhere_changes_the_sum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = some(dtype, *shape)
    before = bit_sum(tensor)
    flat = tensor.reshape(-1)
    for place in range(flat.numel()):
        changed = flat.clone()
        changed[place : place + 1].view(torch.uint8)[0] ^= 1
        assert not torch.equal(bit_sum(changed), before)
    assert torch.equal(bit_sum(tensor.clone()), before)


def test_any_layout_and_place_in_memory() -> None:
    image = some(torch.float32, 2, 3, 4, 4)
    row = some(torch.float32, 9)
    assert bit_sum(image.to(memory_format=torch.channels_last)).shape == ()
    assert bit_sum(row[1:]) == bit_sum(row[1:].clone())
    assert bit_sum(torch.tensor([float("nan")])) == bit_sum(torch.tensor([float("nan")]))


@pytest.mark.parametrize(
    ("values", "odd"),
    [("aaa", []), ("aab", [2]), ("baa", [0]), ("ab", [0, 1]), ("aabb", [0, 1, 2, 3]), ("abc", [0, 1, 2]), ("a", [])],
)
def test_the_majority_is_right(values: str, odd: list[int]) -> None:
    assert minority_ranks(values) == odd


def test_code_is_told_apart_by_name_and_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "PACKAGE", tmp_path)
    (tmp_path / "linked").mkdir()
    (tmp_path / "train").symlink_to("linked")
    file = tmp_path / "train" / "a.py"
    seen = {code_digest()}
    for content in ("x = 1\n", "x = 2\n"):
        file.write_text(content)
        seen.add(code_digest())
    file.rename(file.with_name("b.py"))
    seen.add(code_digest())
    assert len(seen) == 4
