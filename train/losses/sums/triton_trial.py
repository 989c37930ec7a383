"""Whether Triton can compile on this machine: it needs a C compiler and a folder for what it has compiled."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from dyad.data.base.errors import first_line

INSTALLED = find_spec("triton") is not None  # builds of torch for the CPU come without it
triton: Any = import_module("triton") if INSTALLED else None
tl: Any = import_module("triton.language") if INSTALLED else None


@cache
def compiles(device: torch.device) -> bool:
    """Whether Triton can compile for the device. If it cannot, a line says why, once."""
    if problem := compile_problem(device):
        print(f"the loss is computed without its GPU kernels, which takes longer: {problem}", file=sys.stderr)
    return not problem


def compile_problem(device: torch.device) -> str:
    """Compile and run a small kernel on a GPU. Returns "", or the reason why that fails and the fix in one line."""
    if not INSTALLED:
        return "Triton is not installed. Fix: install a build of torch for CUDA, which brings it"
    try:
        number = torch.ones(1, device=device)
        with torch.cuda.device_of(number):
            triton.jit(_increment)[(1,)](number)
        if number.item() != 2:
            return "Triton computes wrongly. Fix: run python -m train.doctor"
    except Exception as error:  # whatever compilers, drivers and file systems raise
        in_files = isinstance(error, OSError)
        fix = "set TRITON_CACHE_DIR to a folder of yours" if in_files else "install gcc, or set CC to a C compiler"
        return f"Triton cannot compile: {first_line(error)}. Fix: {fix}"
    if device.type == "cuda" and not _adds_in_float32(device):
        return f"torch {torch.__version__} lacks an addmm that they need. Fix: torch 2.11 or newer"
    return ""


def _adds_in_float32(device: torch.device) -> bool:
    """Whether torch can add a product of half precision to a float32 matrix. torch 2.11 can, 2.10 refuses."""
    half = torch.ones(8, 8, device=device, dtype=torch.float16)
    try:
        torch.addmm(half.float(), half, half, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True


def _increment(number):
    """Add 1 to a number: a kernel to see whether Triton works."""
    tl.store(number, tl.load(number) + 1)
