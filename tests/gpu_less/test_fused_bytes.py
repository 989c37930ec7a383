"""What GPU kernels read and write beside the products: one read of the scores, or two where columns are summed too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_less.fused_bytes import cases, counted

COLUMNS_TOO = {"sums with weights": 8, "sums with a scale for each row and column": 8}
GRADIENTS_TOO = {"their gradient": 10, "their gradient, with that of the scales": 10}
MOST = {**dict.fromkeys(cases(), 6), **COLUMNS_TOO, **GRADIENTS_TOO, "siglip, pairs left out": 7}


@pytest.mark.pretended
@pytest.mark.soak
def test_a_pair_takes_few_bytes(tmp_path: Path) -> None:
    """Float32 scores are 4 bytes, bf16 gradients 2, and a mask 1. Inputs of rows and columns add little."""
    found = counted([*MOST], tmp_path)
    assert {name for name, count in found.items() if count > MOST[name] + 0.1} == set() and len(found) == len(MOST)
