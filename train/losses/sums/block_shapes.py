"""In which block shape a Triton kernel runs: the fastest of a few, timed once; deterministic=true: always the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from dyad.train.losses.sums.triton_trial import INSTALLED, triton

INTERPRETED = INSTALLED and triton.knobs.runtime.interpret
# columns of a block, width at a time, warps, stages
BLOCKS = ((128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4))


def compiled(function: Any) -> Any:
    """Return triton.jit(function), which is not compiled anew when a size changes; False without Triton."""
    sizes = ["first_own", "row_count", "column_count", "group", "keyed_0", "keyed_1"]
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return INSTALLED and triton.jit(function, do_not_specialize=[name for name in sizes if name in names])


def tuned(function: Any) -> Any:
    """Apply triton.autotune to the kernel `function`: choose the fastest block shape of BLOCKS; None without Triton.

    The first call for an embedding width D and a number of kinds of keys times them. Triton's interpreter takes the
    first shape.
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
    """Return the block shapes that are timed: with deterministic=true the first alone, which is not timed either."""
    return shapes[:1] if torch.are_deterministic_algorithms_enabled() else shapes


def _timed(call: Callable[[], object], quantiles: Sequence[float]) -> Any:
    """Return the quantiles of the seconds of a kernel, as Triton measures them; the first call says so."""
    _say_what_is_timed()
    return triton.runtime.driver.active.get_benchmarker()(call, quantiles=quantiles)


@cache
def _say_what_is_timed() -> None:
    line = "the GPU kernels of the loss are compiled and timed in several shapes, for up to half a minute"
    print(f"{line}; later runs find the fastest in Triton's cache (TRITON_CACHE_DIR)", file=sys.stderr, flush=True)
