"""The tensor files of a checkpoint are what safetensors reads, and their digest is that of the file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dyad.data.shards.storage import sha256_of
from dyad.train.run_folder import tensor_files
from dyad.train.run_folder.tensor_files import SavedTensors, save_tensors

TENSORS: dict[str, Tensor] = {
    "b": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a/ä": torch.tensor(1.5, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    "ids": torch.tensor([1, -2]),
    "none": torch.zeros(0, 4),
    "turned": torch.arange(6.0).view(2, 3).T,
    "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
}


@pytest.mark.parametrize("starts", [{}, {"b": 4}], ids=["whole", "cut"])
@pytest.mark.parametrize("piece", [1 << 20, 5])
def test_safetensors_reads_the_same_tensors(
    tmp_path: Path, starts: dict[str, int], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "PIECE", piece)
    ours = tmp_path / "ours"
    assert save_tensors(ours, TENSORS, starts) == sha256_of(ours)
    found = load_file(ours)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) and found[name].dtype == TENSORS[name].dtype for name in found)
    rows = SavedTensors([ours]).rows("b", slice(4, 5))
    assert torch.equal(rows, TENSORS["b"][:1]) == bool(starts)
    header = int.from_bytes(ours.read_bytes()[:8], "little")
    assert header % 8 == 0 and len(ours.read_bytes()) == 8 + header + sum(t.nbytes for t in TENSORS.values())
