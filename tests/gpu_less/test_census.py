"""How often the host waits for the GPU in one training step: once, whatever the objective; and how often ranks meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_less.census import counted, table_cases

# collectives beside DDP's of rank 0 of 8 in four chunks; hard negatives: one of them is the hosts' alone
COLLECTIVES = {
    "symmetric_dpm": 5,
    "clip": 5,
    "gcl": 5,
    "one_sided_dpm": 3,
    "info_nce": 3,
    "simclr": 5,
    "dpr, hard negatives": 4,
    "epr, hard negatives": 4,
    "cross_entropy, hard negatives": 4,
    "listwise_ce, hard negatives": 4,
    "coce": 3,
    "nce": 4,
    "binary_nce": 4,
    "local_nce": 3,
    "siglip": 3,
    "sogclr": 4,
    "isogclr": 6,
    "fastclip_v0": 4,
    "fastclip_v3": 4,
    "nuclr": 5,
    "spectral": 4,
    "spectral_alternating": 2,
    "pca_penalty": 3,
    "vicreg": 5,
    "dpr, hard negatives, known positives": 5,
    "clip, duplicates=mask": 5,
    "clip, duplicates=positive": 5,
}


@pytest.mark.pretended
@pytest.mark.parametrize("world_size", [1, 8])
def test_the_host_waits_once(world_size: int, tmp_path: Path) -> None:
    cases = table_cases(world_size)
    for case, found in zip(cases, counted(cases, tmp_path), strict=True):
        most = (1, 0, COLLECTIVES[case.name] if world_size > 1 else 0)
        assert all(n <= m for n, m in zip(found.counts, most, strict=True)), (case.name, found.counts, most, found)
