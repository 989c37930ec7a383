"""The GPUs of this machine: whether torch can use them, why not and what to do, and the precision to compute in."""

import os
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from dyad.data.base.errors import ConfigError
from dyad.train.config import Precision

HIDING = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide all GPUs; SLURM sets the last one
DEVICE_FILES = Path("/dev")
# Precision → the dtype of autocast; None: none
AUTOCAST = {Precision.fp32: None, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}
_warnings: list[str] = []  # torch's warnings when it first looks for GPUs: it warns once per process


def cuda_usable() -> bool:
    """Whether torch can use a GPU. A warning of torch is not printed: `gpu_problem` reports it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    _warnings.extend(str(warning.message).splitlines()[0] for warning in caught)
    return usable


def has_faiss_gpu(faiss: Any) -> bool:
    """Whether the imported module `faiss` can use a GPU.

    The CPU build of FAISS has no StandardGpuResources; its GPU build may run on a machine without a GPU.
    """
    return hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0


def gpus_hidden() -> bool:
    """Whether CUDA_VISIBLE_DEVICES has one of the values of HIDING, which hide all GPUs."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in HIDING


def gpu_problem() -> tuple[str, str] | None:
    """Return (why torch cannot use the GPUs of this machine, the fix) as text; None if there is no such problem.

    There is no problem if torch can use a GPU, if the machine has no GPU, or if CUDA_VISIBLE_DEVICES hides all of them.
    """
    if cuda_usable() or gpus_hidden() or not (gpu := describe_first_gpu()):
        return None
    built = f"torch {torch.__version__}"
    cpus = "or train on CPUs: CUDA_VISIBLE_DEVICES="
    if torch.version.cuda is None:
        return f"{gpu}, but {built} is built for the CPU", f"install one for CUDA (DYAD_TORCH_INDEX), {cpus}"
    why = _warnings[0] if _warnings else "torch finds no device"
    newer = f"Update the driver to one for CUDA {torch.version.cuda}, set DYAD_TORCH_INDEX to an index of torch"
    return f"{gpu}, but not for {built} of CUDA {torch.version.cuda}: {why}", f"{newer} for an older CUDA, {cpus}"


def describe_first_gpu() -> str:
    """Return a text that names the first GPU of this machine; "" if there is none.

    It has the name and driver version as nvidia-smi prints them; if it prints none, a device file such as /dev/nvidia0.
    CUDA_VISIBLE_DEVICES is not read, so the GPU may be hidden from torch.
    """
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        if shown.strip():
            return f"{shown.splitlines()[0]} (driver)"
    return next((f"{file} is here" for file in sorted(DEVICE_FILES.glob("nvidia[0-9]*"))), "")


def chosen_precision(precision: Precision, device: torch.device) -> Precision:
    """Return `precision` unless it is auto; for auto, bf16 on a GPU of CUDA capability 8.0 or later, else fp32.

    device: that of this process. GPUs of other ranks, which may be older, are not looked at.
    """
    if precision is not Precision.auto:
        return precision
    computes_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return Precision.bf16 if computes_bf16 else Precision.fp32


def emulates_bf16(device: torch.device) -> bool:
    """Whether `device` is a CPU of torch's capability DEFAULT or AVX2, where bf16 is many times slower than fp32."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


def evaluation_precision(precision: Precision, device: torch.device) -> Precision:
    """Return the precision for encoding without training: that of `chosen_precision`, but never an emulated bf16.

    If `chosen_precision` gives bf16, even by the user's choice, and `device` only emulates it, the result is fp32.
    """
    chosen = chosen_precision(precision, device)
    return Precision.fp32 if chosen is Precision.bf16 and emulates_bf16(device) else chosen


@contextmanager
def chosen_kernels(deterministic: bool) -> Iterator[None]:
    """Context manager that makes torch use deterministic GPU kernels, or else the fastest ones of cuDNN.

    deterministic: whether equal inputs must give equal bits. If so, enter the block before the first matrix product on
    a GPU: cuBLAS then reads CUBLAS_WORKSPACE_CONFIG, which the block sets; and an operation in the block that has no
    deterministic kernel raises ConfigError in place of torch's error. The end of the block allows all kernels again,
    but leaves that variable, torch.backends.cudnn.benchmark and torch's fill_uninitialized_memory as the block set
    them.
    """
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.backends.cudnn.benchmark = not deterministic  # tries all kernels for each new shape
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore  # all memory is written first
    try:
        yield
    except RuntimeError as error:
        operation, found, _ = str(error).partition(" does not have a deterministic implementation")
        if not found:
            raise
        raise ConfigError(f"deterministic=true: torch has no deterministic {operation}. Leave it out") from error
    finally:
        torch.use_deterministic_algorithms(False)
