"""Both Triton kernels, compiled ahead of time for GPUs that are not here: registers, spills and shared memory.

python -m tests.gpu_less.compiled_kernels prints the table of RESULTS.md: every block shape, 0 to 2 kinds of keys, bf16,
D = 512. The compiler and ptxas come with Triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from dyad.train.losses.sums import lse_triton

SHARED = {80: 163, 90: 227, 100: 227}  # KiB that one block may take, by compute capability × 10
WIDTH = 512
KERNELS = {"sums": lse_triton._sums_kernel, "gradient": lse_triton._gradient_kernel}


@dataclass(frozen=True)
class Target:
    """What is compiled: a kernel, one of its shapes, for a capability, with `keys` kinds of keys."""

    kernel: str
    shape: int
    capability: int
    keys: int = 0

    @property
    def config(self) -> Any:
        return KERNELS[self.kernel].configs[self.shape]

    def __str__(self) -> str:
        columns, depth = (self.config.kwargs[key] for key in ("BLOCK_COLUMNS", "BLOCK_D"))
        return f"{self.kernel} sm_{self.capability} {columns}×{depth}×{self.config.num_warps}×{self.config.num_stages}"


@dataclass(frozen=True)
class Resources:
    """registers of a thread; stack: bytes of a thread outside of registers (spills); shared: KiB of a block."""

    registers: int
    stack: int
    shared: float


def resources(target: Target, dtype: str = "bf16", width: int = WIDTH) -> Resources:
    """Compile; raises what Triton or ptxas raise."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile as compile_

    kernel, config = KERNELS[target.kernel].fn, target.config
    constants = {
        "D": width, "KEYS": target.keys, "OWN_DROPPED": False, "INTERPRETED": False,
        "BLOCK_ROWS": lse_triton.BLOCK_ROWS, **config.kwargs,
    }  # fmt: skip
    types = {name: _type(name, target.keys, dtype) for name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else kind for name, kind in types.items()}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name == "stride"]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = compile_(source, target=GPUTarget("cuda", target.capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return Resources(usage["REG"], usage["STACK"] + usage["LOCAL"], compiled.metadata.shared / 1024)


def _type(name: str, keys: int, dtype: str) -> str:
    """The type of a kernel's argument, as Triton writes it."""
    if "_keys_" in name:
        return "*i64" if int(name[-1]) < keys else f"*{dtype}"
    if name in ("x", "y", "g"):
        return f"*{dtype}"
    return "*fp32" if name in ("of_rows", "of_columns", "u", "v", "exponent") else "i32"


def all_resources(targets: list[Target]) -> Iterator[tuple[Target, Resources]]:
    """Compile in two threads: most of the time is ptxas's."""
    with ThreadPoolExecutor(2) as pool:
        yield from zip(targets, pool.map(resources, targets), strict=True)


def markdown() -> str:
    """The table of RESULTS.md."""
    shapes, all_keys = range(len(KERNELS["sums"].configs)), range(lse_triton.KEYS + 1)
    lines = ["| kernel, columns×D×warps×stages | shared | KEYS=0 | KEYS=1 | KEYS=2 |", "|---|---|---|---|---|"]
    targets = [Target(k, s, c, n) for c, k, s, n in product(SHARED, KERNELS, shapes, all_keys)]
    found = dict(all_resources(targets))
    for capability, kernel, shape in product(SHARED, KERNELS, shapes):
        rows = [found[Target(kernel, shape, capability, keys)] for keys in all_keys]
        numbers = " | ".join(f"{r.registers}, {r.stack} B" for r in rows)
        lines.append(f"| {Target(kernel, shape, capability)} | {max(r.shared for r in rows):.0f} KiB | {numbers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
