"""Sharded towers (fsdp2, hsdp) take two training steps as rank 0 of 64, or with --soak of 512, pretended GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_less.sharded_steps import LAYERS, Case, results

# case; chunks of a step; all-reduces of the objective and of the scalars
Steps = list[tuple[Case, int, int]]
FEW: Steps = [
    (Case("clip", precision="bf16"), 1, 3),
    (Case("siglip", shard_size=8, chunk_size=4, recompute=True), 2, 1),
]
MORE: Steps = [
    (Case("clip", 512), 1, 3),
    (Case("clip", 512, precision="bf16", chunk_size=4), 2, 3),
    (Case("siglip", 512, shard_size=8, chunk_size=4, recompute=True), 2, 1),
]
TOLERANCE = {"fp32": (1e-6, 1e-5), "bf16": (2e-3, 0.1)}  # of losses, and of norms of the gradient
GROUPS = 2 * (LAYERS + 1)  # of weights that are gathered together: each layer of both towers, and what is around them


@pytest.mark.pretended
@pytest.mark.parametrize("cases", [FEW, pytest.param(MORE, marks=pytest.mark.soak)], ids=["few", "more"])
def test_all_is_sharded_on_the_gpu_and_as_on_a_cpu(cases: Steps, tmp_path: Path) -> None:
    """A tensor on the wrong device raises. The host waits once a step, and ranks meet as seldom as they can.

    Of every chunk but the last, the towers run forward twice. The one further all-gather and reduce-scatter is the
    objective's.
    """
    for (case, chunks, all_reduces), steps in zip(cases, results([case for case, *_ in cases], tmp_path), strict=True):
        of_losses, of_norms = TOLERANCE[case.precision]
        assert steps.scalars[::2] == pytest.approx(steps.scalars_on_cpu[::2], rel=of_losses), case
        assert steps.scalars[1::2] == pytest.approx(steps.scalars_on_cpu[1::2], rel=of_norms), case
        assert len(steps.held) == 4 * 2 * (2 + 3 * LAYERS), steps.held
        for name, held in steps.held.items():
            assert held.sharded and held.device == "cuda:0", (case, name, held)
            assert held.own_rows == -(-held.rows // (case.shard_size or case.world_size)), (case, name, held)
        (line,) = steps.reads
        assert line.startswith("train/step/step.py:") and steps.reads[line] == 1 and not steps.copies, steps
        of_copies = GROUPS if case.shard_size else 0  # each gradient is also averaged over the copies of the weights
        assert steps.collectives == {
            "_allgather_base_": GROUPS * (3 * chunks - 1) + 1,
            "_reduce_scatter_base_": GROUPS + 1,
            "allreduce_": all_reduces + of_copies,
            "all_reduce": 1,  # of the norm of the gradient
        }, (case, steps.collectives)
