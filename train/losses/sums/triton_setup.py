"""Triton on this machine: whether it can compile, and which block shape a kernel uses.

Triton needs a C compiler and a folder for what it has compiled. Each kernel is timed in a few block shapes, once for
each embedding width and number of kinds of keys, and runs in the fastest; with deterministic=true it always runs in the
first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from dyad.data.base.errors import first_line

INSTALLED = find_spec("triton") is not None  # builds of torch for the CPU come without it
triton: Any = import_module("triton") if INSTALLED else None
tl: Any = import_module("triton.language") if INSTALLED else None
INTERPRETED = INSTALLED and triton.knobs.runtime.interpret
# block shapes: columns of a block, embedding dimensions multiplied at a time, warps, pipeline stages
BLOCKS = ((128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4))


@cache
def compiles(device: torch.device) -> bool:
    """Whether the loss can use its Triton kernels on `device`. If not, print why (compile_problem) to stderr, once."""
    if problem := compile_problem(device):
        print(f"the loss is computed without its GPU kernels, which takes longer: {problem}", file=sys.stderr)
    return not problem


def compile_problem(device: torch.device) -> str:
    """Return "" if the loss can use its Triton kernels on `device`, else the reason and the fix in one line.

    A small kernel is compiled and run to find out. On CUDA, torch.addmm must also be able to add a product of fp16
    matrices to a float32 matrix (torch 2.11 or newer).
    """
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
    """Whether torch.addmm can add a product of fp16 matrices to a float32 matrix (from torch 2.11 on)."""
    half = torch.ones(8, 8, device=device, dtype=torch.float16)
    try:
        torch.addmm(half.float(), half, half, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True


def _increment(number):
    """Add 1 to the number at the pointer `number`: a kernel to see whether Triton works."""
    tl.store(number, tl.load(number) + 1)


def compiled(function: Any) -> Any:
    """Return triton.jit(function), which does not specialise on arguments that are sizes; False without Triton.

    So a kernel is not compiled again when a size of the batch changes.
    """
    sizes = ["first_own", "row_count", "column_count", "group", "keyed_0", "keyed_1"]
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return INSTALLED and triton.jit(function, do_not_specialize=[name for name in sizes if name in names])


def tuned(function: Any) -> Any:
    """Return triton.autotune of the kernel `function`, which chooses the fastest block shape of BLOCKS.

    The first call with an embedding width D and a number of kinds of keys measures the time of each shape, unless
    Triton's cache on disk has the result. Triton's interpreter, and torch under use_deterministic_algorithms, take the
    first shape. Returns None if Triton is not installed.
    """
    if not INSTALLED:
        return None
    configs = [
        triton.Config({"BLOCK_COLUMNS": columns, "BLOCK_D": depth}, num_warps=warps, num_stages=stages)
        for columns, depth, warps, stages in BLOCKS[: 1 if INTERPRETED else None]
    ]
    choice = {"early_config_prune": shapes_to_time}
    return triton.autotune(configs, ["D", "KEYS"], prune_configs_by=choice, do_bench=_timed, cache_results=True)(
        compiled(function)
    )


def shapes_to_time(shapes: list[Any], *_: object, **_arguments: object) -> list[Any]:
    """Return the block shapes to time: `shapes`, or only the first under torch.use_deterministic_algorithms.

    Triton does not time a single shape. The other arguments, which triton.autotune passes, are ignored.
    """
    return shapes[:1] if torch.are_deterministic_algorithms_enabled() else shapes


def _timed(call: Callable[[], object], quantiles: Sequence[float]) -> Any:
    """Return quantiles of the milliseconds that a kernel takes, measured by Triton; print a line at the first call."""
    _say_what_is_timed()
    return triton.runtime.driver.active.get_benchmarker()(call, quantiles=quantiles)


@cache
def _say_what_is_timed() -> None:
    line = "the GPU kernels of the loss are compiled and timed in several shapes, for up to half a minute"
    print(f"{line}; later runs find the fastest in Triton's cache (TRITON_CACHE_DIR)", file=sys.stderr, flush=True)
