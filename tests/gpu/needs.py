"""Marks of tests: the device they run on, and what of the machine they need beside it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]  # the same check, tiny on a CPU
ON_GPU = pytest.mark.gpu


def gpus(count: int) -> pytest.MarkDecorator:
    """Not run with fewer GPUs."""
    here = torch.cuda.device_count()
    return pytest.mark.skipif(here < count, reason=f"needs {count} GPUs, {here} here")


def newer_torch(version: str) -> pytest.MarkDecorator:
    """Not run with an older torch."""
    here = torch.__version__.split("+")[0]
    older = tuple(map(int, here.split(".")[:2])) < tuple(map(int, version.split(".")))
    return pytest.mark.skipif(older, reason=f"needs torch {version}, {here} here")


def packages(*names: str) -> pytest.MarkDecorator:
    """Not run without one of these packages."""
    missing = [name for name in names if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


TRAINER = packages("accelerate", "hydra", "open_clip", "transformers", "pydantic", "rich")  # of python -m train
KERNELS = newer_torch("2.11")  # an addmm of half precision that adds up in float32
