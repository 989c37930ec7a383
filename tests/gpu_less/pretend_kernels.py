"""The Triton kernels of lse_triton.py for pretended tensors: the same sums on the CPU, written to the same places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dyad.train.losses.sums import fused_tiles, lse_triton, tiles
from tests.gpu_less.pretend_cuda import on_cpu

Arguments = dict[str, Any]


class PretendKernel:
    """Is launched as a Triton kernel, kernel[grid](…), and calls compute(arguments by name) instead."""

    def __init__(self, kernel: Any, compute: Callable[[Arguments], None]) -> None:
        self._names, self._compute = kernel.arg_names, compute

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *values: Any, **named: Any) -> None:
        given = dict(zip(self._names, values, strict=False)) | named
        assert all(value.is_cuda for value in given.values() if isinstance(value, Tensor)), "a pointer of the host"
        with torch.no_grad():
            self._compute({name: on_cpu(value) for name, value in given.items()})


def _exponentials(a: Arguments) -> Tensor:
    """E of all rows and columns of a launch, float32."""
    scale, shift = a["exponent"]
    e = torch.exp2((a["x"].float() @ a["y"].float().T) * scale - shift)
    own = torch.zeros(e.shape, dtype=torch.bool)
    rows = torch.arange(len(e))
    columns = rows + a["first_own"]
    there = (columns >= 0) & (columns < e.shape[1])
    own[rows[there], columns[there]] = True
    for kind in range(a["KEYS"]):
        keyed = a[f"keyed_{kind}"]
        equal = a[f"row_keys_{kind}"][:, None] == a[f"column_keys_{kind}"][:keyed]
        e[:, :keyed][equal & ~own[:, :keyed]] = 0.0
    return e.masked_fill_(own, 0.0) if a["OWN_DROPPED"] else e


def _sums(a: Arguments) -> None:
    e = _exponentials(a)
    for row_sums, group in zip(a["of_rows"], e.split(a["group"], 1), strict=True):
        row_sums.copy_(group.sum(1))
    for column_sums, block in zip(a["of_columns"], e.split(lse_triton.BLOCK_ROWS), strict=True):
        column_sums.copy_(block.sum(0))


def _gradient(a: Arguments) -> None:
    a["g"].copy_(_exponentials(a) * (a["u"][:, None] + a["v"]))


@contextmanager
def computed_kernels() -> Iterator[None]:
    """Both kernels are computed on the CPU during the block, as if Triton could compile for the pretended GPU.

    So are the functions that torch.compile would make kernels of; they run as they stand.
    """
    instead = {
        "compiles": lambda device: True,
        "_sums_kernel": PretendKernel(lse_triton._sums_kernel, _sums),
        "_gradient_kernel": PretendKernel(lse_triton._gradient_kernel, _gradient),
    }
    with ExitStack() as patches:
        patches.enter_context(patch.object(tiles, "fuses", lambda device: device.type == "cuda"))
        patches.enter_context(patch.object(fused_tiles, "fuses", lambda device: False))
        for name, value in instead.items():
            patches.enter_context(patch.object(lse_triton, name, value))
        yield
