"""The Triton kernels compiled for A100, H100 and B200: spills without keys, and shared memory within limits."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("triton")

from tests.gpu_less.compiled_kernels import KERNELS, SHARED, Target, all_resources, resources

# Bytes a thread that the sums may spill without keys: large blocks do on A100 and B200, and tuning chooses what is
# fastest. The block of 128 columns and eight warps, and the sums on H100, must not spill; nor must any gradient
MOST = {80: 80, 90: 0, 100: 224}
CLEAN = 2


def allowed(target: Target) -> int:
    return MOST[target.capability] if target.kernel == "sums" and target.shape != CLEAN else 0


SHAPES = range(len(KERNELS["sums"].configs))
EVERY = pytest.param([*product(SHARED, SHAPES)], marks=pytest.mark.soak, id="every shape")
FEW = pytest.param([*((capability, CLEAN) for capability in SHARED), (90, SHAPES[0])], id="a few")


@pytest.mark.triton
@pytest.mark.parametrize("shapes", [FEW, EVERY])
def test_a_shape_fits_and_hardly_spills(shapes: list[tuple[int, int]]) -> None:
    targets = [Target(kernel, shape, capability) for capability, shape in shapes for kernel in KERNELS]
    for target, used in all_resources(targets):
        assert used.shared <= SHARED[target.capability], (target, used)
        assert used.stack <= allowed(target), (target, used)


@pytest.mark.triton
def test_keys_and_other_widths_and_types_compile() -> None:
    """Two kinds of keys pay with spilled registers in the forward, at most 112 bytes a thread."""
    for kernel, most in (("sums", 112), ("gradient", 0)):
        assert resources(Target(kernel, 2, 90, keys=2)).stack <= most
    for width, dtype in ((72, "bf16"), (1280, "fp16")):
        used = resources(Target("sums", 3, 90), dtype, width)
        assert used.stack == 0 and used.shared <= SHARED[90]
