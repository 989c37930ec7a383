"""Every objective in every precision takes two training steps on a pretended GPU, and gets the loss of a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_less.census import FURTHER, PAIRED, Case, counted

TOLERANCE = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 5e-3}  # of the loss, which is of the order of 1; rounded embeddings


@pytest.mark.pretended
@pytest.mark.parametrize(("precision", "chunk_size"), [("fp32", 8), ("bf16", None), ("fp16", 8)])
def test_no_tensor_is_on_the_wrong_device_and_the_loss_is_right(
    precision: str, chunk_size: int | None, tmp_path: Path
) -> None:
    cases = [Case(name, precision, chunk_size, further=name in FURTHER, known=name == "dpr") for name in PAIRED]
    for case, found in zip(cases, counted(cases, tmp_path), strict=True):
        error = abs(found.loss - found.loss_on_cpu) / max(1.0, abs(found.loss_on_cpu))
        assert error <= TOLERANCE[precision], (case, found)
