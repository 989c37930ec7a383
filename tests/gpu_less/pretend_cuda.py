"""Tensors that say they are on cuda:0, refuse what a GPU refuses, and compute on the CPU; and a count of what blocks.

torch's FakeTensorMode gives each tensor a device, a type and a shape without memory, and raises where an operation
mixes devices. PretendCuda adds to each of them a tensor on the CPU with its numbers, so that a value that the host
reads is the one that a GPU would have, as far as rounding allows, and the program takes the branches of a real run.

The autograd engine asks the CUDA driver for a context, even for such tensors. So a program that uses them runs with
the libraries of `environment`: a stub of libcuda and libcudart (stub/*.c) in which every call succeeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).parents[2]
GPU = torch.device("cuda", 0)
aten: Any = torch.ops.aten


def environment(folder: Path) -> dict[str, str]:
    """Compile the stub into `folder`; return the environment variables with which a process uses it."""
    stub = Path(__file__).parent / "stub"
    driver, runtime = folder / "libcuda.so.1", folder / "runtime.so"
    compiler = ["gcc", "-shared", "-fPIC", "-w"]
    subprocess.run([*compiler, "-o", driver, stub / "driver.c", f"-Wl,-soname,{driver.name}"], check=True)
    subprocess.run([*compiler, "-o", runtime, stub / "runtime.c"], check=True)
    return {"LD_LIBRARY_PATH": str(folder), "LD_PRELOAD": str(runtime)}


def answers(module: str, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Run `python -m module --json CASES` with the stub of CUDA; return the lines of JSON that it prints.

    Raises RuntimeError with its last lines if it fails. folder: for the stub.
    """
    variables = {**os.environ, **environment(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"}
    program = [sys.executable, "-m", module, "--json", json.dumps(cases)]
    ended = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, env=variables, timeout=900)
    if ended.returncode:
        raise RuntimeError(f"{ended.stdout[-500:]}\n{ended.stderr[-4000:]}")
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


class PretendCuda(FakeTensorMode):
    """Within `with PretendCuda() as mode`, tensors made for cuda:0 are pretended; others stay on the pretended host.

    reads: how often the host waited for a number or a size of the GPU, and copies: for a copy between them, by the line
    of our packages that asked; collectives: how often ranks met, by operation. `forget` sets all to zero.
    """

    avoid_device_init = property(lambda self: True)  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self) -> None:
        torch._C._ensureCUDADeviceGuardSet()
        super().__init__(allow_non_fake_inputs=True)
        self.forget()
        self._inside = False

    def forget(self) -> None:
        self.reads, self.copies, self.collectives = Counter[str](), Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):  # of a sharded tensor: asks again for each rank's part
            return NotImplemented
        if self._inside:  # a step of torch's own way to a fake result
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._count(func, args, kwargs)
        compute: Any = EMULATED.get(func, func)
        found = compute(*tree_map(on_cpu, args), **_for_cpu(kwargs))
        if func.namespace == "c10d" or func in NUMBERS or func is aten.record_stream.default:
            return found
        return self._pretended(func, types, args, kwargs, found)

    def _pretended(self, func: Any, types: Any, args: Any, kwargs: Any, found: Any) -> Any:
        """Return what torch's fakes say of an operation, each with its numbers, the part of `found` in its place."""
        self._inside = True
        try:
            try:
                result = super().__torch_dispatch__(func, types, args, kwargs)
            except (DynamicOutputShapeException, DataDependentOutputException):  # the sizes depend on numbers
                device = next(t.device for t in tree_leaves((args, kwargs)) if isinstance(t, FakeTensor))
                with self:
                    result = tree_map(
                        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device), found
                    )
        finally:
            self._inside = False
        for fake, numbers in zip(tree_leaves(result), tree_leaves(found), strict=True):
            if isinstance(fake, FakeTensor):
                assert fake.shape == numbers.shape and fake.dtype == numbers.dtype, (func, fake, numbers.shape)
                fake.on_cpu = numbers  # pyright: ignore[reportAttributeAccessIssue]
        return result

    def _count(self, func: Any, args: Any, kwargs: Any) -> None:
        if func.namespace in {"c10d", "_c10d_functional"} and func is not WAIT:  # the second: of sharded tensors
            self.collectives[func.overloadpacket.__name__] += 1
            devices = {t.device for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            if len(devices) > 1:
                raise RuntimeError(f"{func} of tensors on {devices}")
        elif func in COPIES:
            source = args[0] if func is aten._to_copy.default else args[1]
            target = kwargs.get("device") if func is aten._to_copy.default else args[0].device
            waits = not (kwargs.get("non_blocking") or (func is aten.copy_.default and len(args) > 2 and args[2]))
            if target is not None and waits and torch.device(target).type != source.device.type:
                self.copies[asking_line()] += 1
        elif _reads(func, args, kwargs) and any(_on_gpu(t) for t in tree_leaves(args)):
            self.reads[asking_line()] += 1


WAIT: Any = torch.ops._c10d_functional.wait_tensor.default  # on a GPU the stream waits, not the host
COPIES = (aten._to_copy.default, aten.copy_.default)
NUMBERS = {aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default}
READING = NUMBERS | {  # the size of their result is known to the GPU alone
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}


def _reads(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation makes the host wait until the GPU knows a number."""
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1]):
        return len(args) < 3 or args[2].dim() > 0  # one value under a mask is filled in without counting the mask
    return func in READING


def on_cpu(value: Any) -> Any:
    """Return the numbers of a pretended tensor; anything else as it is."""
    return value.on_cpu if isinstance(value, FakeTensor) else value  # pyright: ignore[reportAttributeAccessIssue]


def _on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def _for_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments for the operation on the CPU."""
    numbers = {key: tree_map(on_cpu, value) for key, value in kwargs.items() if key != "pin_memory"}
    return {**numbers, "device": torch.device("cpu")} if numbers.get("device") else numbers


def _wide_addmm(
    total: Tensor, left: Tensor, right: Tensor, *_: Any, out: Tensor | None = None, beta: float = 1, **more: Any
) -> Tensor:
    """addmm(out_dtype=float32), which a CPU does not have."""
    return torch.addmm(total, left.float(), right.float(), beta=beta, out=out)


def _wide_mm(left: Tensor, right: Tensor, *_: Any, out: Tensor | None = None) -> Tensor:
    """mm(out_dtype=float32), which a CPU does not have."""
    return torch.mm(left.float(), right.float(), out=out)


EMULATED: dict[Any, Callable[..., Any]] = {
    aten.addmm.dtype: _wide_addmm,
    aten.addmm.dtype_out: _wide_addmm,
    aten.mm.dtype: _wide_mm,
    aten.mm.dtype_out: _wide_mm,
    aten.record_stream.default: lambda *_: None,
}


def asking_line() -> str:
    """The innermost line of our packages that runs now, as file:line."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename).resolve()
        if any(path.is_relative_to(ROOT / package) for package in ("data", "train", "eval", "dyad")):
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return "elsewhere"


@contextmanager
def pretended() -> Iterator[PretendCuda]:
    """A PretendCuda mode; its tensors give their numbers to lists and arrays, and take those of what becomes .data."""
    with PretendCuda() as mode:
        whole = FakeTensor.tolist, FakeTensor.numpy

        def tolist(tensor: FakeTensor) -> Any:
            if tensor.is_cuda:
                mode.reads[asking_line()] += 1
            return on_cpu(tensor).tolist()

        def become(tensor: FakeTensor, value: FakeTensor) -> None:
            Tensor.data.__set__(tensor, value)  # pyright: ignore[reportAttributeAccessIssue]
            tensor.fake_device, tensor.on_cpu = value.fake_device, value.on_cpu  # pyright: ignore[reportAttributeAccessIssue]

        FakeTensor.data = property(Tensor.data.__get__, become)  # pyright: ignore[reportAttributeAccessIssue]
        FakeTensor.tolist = tolist  # pyright: ignore[reportAttributeAccessIssue]
        FakeTensor.numpy = lambda tensor, **_: on_cpu(tensor).numpy()  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield mode
        finally:
            FakeTensor.tolist, FakeTensor.numpy = whole
            del FakeTensor.data
