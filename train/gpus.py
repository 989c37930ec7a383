"""GPUs by name: peak FLOPs, bandwidth to the other GPUs of a node, memory. Figures of NVIDIA's data sheets."""

import re
from typing import NamedTuple


class GpuFigures(NamedTuple):
    """Figures of a GPU; None: unknown.

    half: peak TFLOP/s of dense products in bf16 and fp16, of a GPU without TF32 in fp16 alone. tf32: the same in TF32,
    of a GPU without TF32 in FP32. Data sheets' figures "with sparsity" are halved. link: GB/s to another GPU of its
    node in one direction: half of the figure for NVLink, or PCIe with 16 lanes.
    """

    half: float | None = None
    tf32: float | None = None
    link: float | None = None


# Pattern of whole words in a GPU's name → its figures. The first pattern that is found gives them.
GPUS = {
    "MIG": GpuFigures(),
    "GB200": GpuFigures(2500, 1250, 900),
    "B200": GpuFigures(2250, 1125, 900),
    "H200 NVL": GpuFigures(835.5, 417.5, 450),
    "G?H200": GpuFigures(989.4, 494.7, 450),
    "H100 PCIe": GpuFigures(756, 378, 64),
    "H100 NVL": GpuFigures(835, 417.5, 450),
    "H100": GpuFigures(989.4, 494.7, 450),
    "A100(-PCIE| .*PCIe)": GpuFigures(312, 156, 32),
    "A100": GpuFigures(312, 156, 300),
    "L40S": GpuFigures(362, 183, 32),
    "L40": GpuFigures(181, 90.5, 32),
    "L4": GpuFigures(121, 60.5, 32),
    "A10G": GpuFigures(70, 35, 32),
    "A10": GpuFigures(125, 62.5, 32),
    "RTX 4090": GpuFigures(165.2, 82.6, 32),
    "V100-PCIE": GpuFigures(112, 14, 16),
    "V100": GpuFigures(125, 15.7, 150),
    "Tesla T4": GpuFigures(65, 8.1, 16),
}
# Value of plan.gpu → (memory in units of 2^30 bytes, which are the GB of the data sheets, a name of the GPU)
KINDS = {
    "h100": (80, "H100"),
    "h100-pcie": (80, "H100 PCIe"),
    "h200": (141, "H200"),
    "b200": (180, "B200"),
    "a100-40": (40, "A100"),
    "a100-80": (80, "A100"),
    "l40s": (48, "L40S"),
    "l4": (24, "L4"),
    "a10g": (24, "A10G"),
    "rtx4090": (24, "RTX 4090"),
    "v100-16": (16, "V100"),
    "v100-32": (32, "V100"),
    "t4": (16, "Tesla T4"),
}


def gpu_figures(name: str) -> GpuFigures:
    """Return the figures of a GPU, all of them None if GPUS has no pattern for it. name: as
    torch.cuda.get_device_name returns it."""
    found = (figures for words, figures in GPUS.items() if re.search(rf"\b{words}(?!\w)(?! Laptop)", name))
    return next(found, GpuFigures())
