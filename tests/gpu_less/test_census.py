"""How often the host waits for the GPU in one training step: at most so often, objective by objective."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_less.census import counted, table_cases

# objective: blocking reads, blocking copies, collectives beside DDP's; one process, then rank 0 of 8 in four chunks
MOST = """
symmetric_dpm: 8 5 0  9 6 8
clip: 8 5 0  9 6 8
gcl: 8 4 0  9 5 8
one_sided_dpm: 8 5 0  9 6 8
info_nce: 8 5 0  9 6 8
simclr: 8 4 0  9 5 7
dpr, hard negatives: 20 4 0  21 5 13
epr, hard negatives: 20 4 0  21 5 13
cross_entropy, hard negatives: 20 4 0  21 5 13
listwise_ce, hard negatives: 20 4 0  21 5 13
coce: 1 0 0  2 1 5
nce: 1 2 0  2 3 5
binary_nce: 1 2 0  2 3 5
local_nce: 1 0 0  2 1 4
siglip: 1 0 0  2 1 4
sogclr: 10 13 0  12 14 11
isogclr: 3 10 0  7 11 12
fastclip_v0: 10 13 0  12 14 11
fastclip_v3: 10 13 0  12 14 11
nuclr: 9 15 0  13 16 12
spectral: 1 1 0  2 2 5
spectral_alternating: 1 1 0  2 2 3
pca_penalty: 1 1 0  2 2 4
clip, duplicates=mask: 11 4 0  12 5 10
clip, duplicates=positive: 11 4 0  12 5 10
"""
BOUNDS = {name: tuple(map(int, numbers.split())) for name, numbers in (r.split(":") for r in MOST.strip().splitlines())}


@pytest.mark.pretended
@pytest.mark.parametrize("world_size", [1, 8])
def test_the_host_waits_at_most_so_often(world_size: int, tmp_path: Path) -> None:
    cases = table_cases(world_size)
    for case, found in zip(cases, counted(cases, tmp_path), strict=True):
        most = BOUNDS[case.name][:3] if world_size == 1 else BOUNDS[case.name][3:]
        assert all(n <= m for n, m in zip(found.counts, most, strict=True)), (case.name, found.counts, most, found)
