"""How many bytes of memory GPU kernels read and write for a pair of a tile, as torch's compiler plans them.

python -m tests.gpu_less.fused_bytes prints the table of RESULTS.md. Nothing is run: the functions of losses/sums are
compiled for fake tensors of an H100 up to the plan of its kernels, which counts bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dyad.train.losses.objectives.logistic import _labelled_by_key, _noise_loss
from dyad.train.losses.objectives.oce import KL, CVaR
from dyad.train.losses.sums import fused_tiles, pair_sum
from tests.gpu_less.pretend_cuda import answers

ROWS, COLUMNS = 1024, 1536
H100 = SimpleNamespace(
    name="H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32, gcnArchName="",
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20, clock_rate=1980000, memory_clock_rate=2619000, memory_bus_width=5120,
)  # fmt: skip


def cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The functions, and arguments of one tile."""
    s, scale, shift = torch.zeros(ROWS, COLUMNS), torch.tensor(2.0), torch.tensor(3.0, dtype=torch.float64)
    mask, u, v = torch.zeros(ROWS, COLUMNS, dtype=torch.bool), torch.zeros(ROWS), torch.zeros(COLUMNS)
    keys, half, terms = (torch.arange(ROWS)[:, None], torch.arange(COLUMNS)[None]), torch.bfloat16, pair_sum._terms

    def of_oce(oce: Any) -> Callable[..., Tensor]:
        return lambda s, p, nu, tau: tau * oce.conjugate((s - p - nu) / tau)

    scales = fused_tiles.TileLogits(u[:, None], v, None, None)
    of_rows = [u[:, None], u[:, None], shift.float()]
    return {
        "sums with weights": (fused_tiles.exp_sums, (s, scale, shift, None, None, v)),
        "their gradient": (fused_tiles.exp_gradients, (s, scale, shift, None, u, v, None, v, half)),
        "sums with a scale for each row and column": (fused_tiles.log_sums, (s, scales, None)),
        "their gradient, with that of the scales": (
            fused_tiles.log_sum_gradients,
            (s, scales, None, (u, v), (u, v), half),
        ),
        "the whole row: coce, KL of scores": (fused_tiles.row_exponentials, (s, scale, -1e38, half)),
        "siglip, local_nce, nce": (terms, (s, scale, None, None, _noise_loss, [shift.float()], [0], half)),
        "siglip, pairs left out": (terms, (s, scale, mask, None, _noise_loss, [shift.float()], [0], half)),
        "siglip, positives by key": (
            terms,
            (s, scale, None, None, _labelled_by_key(1, 2.0), [*keys, shift.float()], [2], half),
        ),
        "nce, log q of columns": (terms, (s, scale, None, None, _noise_loss, [v[None], shift.float()], [1], half)),
        "coce, KL": (terms, (s, None, None, u, of_oce(KL(False)), of_rows, [0, 1, 2], half)),
        "coce, CVaR": (terms, (s, None, None, u, of_oce(CVaR(0.2)), of_rows, [0, 1, 2], half)),
    }


def bytes_of_a_pair(function: Any, arguments: tuple[Any, ...]) -> float:
    """Compile for a fake H100, up to the plan of the kernels. Needs the stub of CUDA of pretend_cuda.environment."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    class Planned(BaseException):
        """The plan is there."""

    def planned(graph: Any) -> None:
        graph.init_wrapper_code()
        graph._update_scheduler()
        raise Planned(graph.count_bytes()[0])

    there = {"is_available": True, "current_device": 0, "device_count": 1, "get_device_properties": H100}
    there |= {"get_device_capability": (9, 0), "_lazy_init": None}
    patches = [patch.object(torch.cuda, name, lambda *_, value=value: value) for name, value in there.items()]
    patches += [patch.object(GraphLowering, "codegen", planned)]
    for each in patches:
        each.start()
    try:
        with FakeTensorMode(), torch.no_grad():
            fake = tree_map(
                lambda v: torch.empty(v.shape, dtype=v.dtype, device="cuda") if isinstance(v, Tensor) else v, arguments
            )
            leaves, shape = tree_flatten(fake)
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

            def of_tensors(*tensors: Tensor) -> list[Tensor]:
                given = {**dict(enumerate(leaves)), **dict(zip(places, tensors, strict=True))}
                found = function.__wrapped__(*tree_unflatten(given.values(), shape))
                return [value for value in found if value is not None]

            inputs = [leaves[i] for i in places]
            graph = make_fx(of_tensors, tracing_mode="fake", decomposition_table=select_decomp_table())(*inputs)
            compile_fx_inner(graph, inputs)
    except Planned as plan:
        return plan.args[0] / (ROWS * COLUMNS)
    finally:
        for each in patches:
            each.stop()
    raise AssertionError("no plan was made")


def counted(names: list[str], folder: Path) -> dict[str, float]:
    """Count in one process with the stub of CUDA. folder: for the stub."""
    lines = answers("tests.gpu_less.fused_bytes", [{"name": name} for name in names], folder)
    return {line["name"]: line["bytes"] for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="cases, as JSON: the environment has the stub")
    given = parser.parse_args().json
    if given is not None:
        for case in json.loads(given):
            count = bytes_of_a_pair(*cases()[case["name"]])
            print(json.dumps({"name": case["name"], "bytes": count}), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = counted([*cases()], Path(folder))
    print("| of a tile | bytes a pair |\n|---|---|")
    print("\n".join(f"| {name} | {count:.1f} |" for name, count in found.items()))


if __name__ == "__main__":
    main()
