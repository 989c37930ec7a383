"""Shared code of all export formats: the exported model, and the check that a library computes its embeddings."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from safetensors.torch import load_file, save_file
from torch import Tensor

from dyad.data.base.errors import ConfigError, HardwareError
from dyad.export import reload
from dyad.train.config import TrainConfig
from dyad.train.towers.libraries.calibration import Calibration
from dyad.train.towers.models import TwoTowerModel
from dyad.train.tracking.panel_types import Scored

TOLERANCE = 1e-5  # largest allowed difference of a coordinate / L2 norm of the row; rounding differs by less
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")), undefined=StrictUndefined, trim_blocks=True
)
TEMPLATES.filters |= {"literal": lambda text: json.dumps(text, ensure_ascii=False), "repr": repr}
# the texts that the check of an export embeds
PROBES = ["a red circle", "Grüße aus Köln", "wheel of dharma, religion, Buddhist"]


@dataclass(frozen=True)
class ExportSource:
    """A trained model to export, with the data that its model card needs.

    name: the name of the run. model: as it is used after training, without projection heads (`representation` in
    train/towers/heads.py). calibration: scale and bias of the logits at the end of training; None: the export gets the
    library's initial values. step: finished optimiser steps, None if unknown. results: scores of the evaluations at
    that step. classes: class name → its vector, float32 (D,), of a model of task=labelled.
    """

    name: str
    config: TrainConfig
    model: TwoTowerModel
    calibration: Calibration | None = None
    step: int | None = None
    results: Sequence[Scored] = ()
    classes: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """Inputs for one call of an exported encoder by a library, with our embeddings of the same inputs to compare.

    The inputs are n `texts`; n pairs of `texts` and `pairs`; n `images`, uint8 (n, 3, H, W) with H and W in pixels; or
    `hints` alone, for formats whose inputs are token ids or numbers of items. ours: our embeddings (n, D) on the CPU,
    which the library must reproduce. hints: further arguments of the library's function in dyad/export/reload.py, as
    JSON values.
    """

    ours: Tensor
    texts: Sequence[str] = ()
    pairs: Sequence[str] | None = None
    images: Tensor | None = None
    hints: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Library:
    """One export format: how to write it, check it and describe it.

    name: the library that loads it, a key of LIBRARIES in reload.py. front: metadata for the hub (library_name,
    pipeline_tag, tags). kind: what the model card calls this sort of model. write: fills an existing folder; raises
    ConfigError for a model that the format cannot hold. calls: returns the inputs that check the written folder.
    snippet: returns Markdown on how to load the folder.
    """

    name: str
    front: Mapping[str, Any]
    kind: str
    write: Callable[[Path, ExportSource], None]
    calls: Callable[[ExportSource], Iterable[Call]]
    snippet: Callable[[Path, ExportSource], str]


def render(template: str, folder: Path, source: ExportSource, **values: Any) -> str:
    """Fill in a Jinja template; return the text, Markdown on how to load the export in `folder`.

    template: a file name in dyad/export/templates/. Its variables are `folder` (as text), `config` (that of `source`),
    and those in `values`; a variable that is not defined raises jinja2.UndefinedError. Its filters `literal` and `repr`
    make Python string literals of texts, with double quotes and with single ones.
    """
    return TEMPLATES.get_template(template).render(folder=str(folder), config=source.config, **values)


def probe_images(height: int, width: int | None = None) -> Tensor:
    """Return three noise images, uint8 (3, 3, height, width), the same in each call. width: None for squares."""
    shape = (3, 3, height, width or height)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def compare_embeddings(library: Library, folder: Path, source: ExportSource) -> float:
    """Load an export in its library, and compare our embeddings with the library's; return the largest difference.

    A difference is that of a coordinate, divided by the L2 norm of our embedding. library: the format, whose `calls`
    give the inputs. folder: the export, which the library loads on the CPU in a process of its own. Raises ConfigError
    when the library cannot load the folder, HardwareError when that process is killed, AssertionError when a difference
    exceeds TOLERANCE: the export does not compute the embeddings of the trained model.
    """
    calls = list(library.calls(source))
    with TemporaryDirectory() as temporary:
        job = Path(temporary)
        (job / reload.CALLS).write_text(json.dumps([{"texts": c.texts, "pairs": c.pairs, **c.hints} for c in calls]))
        given = {str(i): call.images for i, call in enumerate(calls) if call.images is not None}
        save_file(given, job / reload.GIVEN)
        in_a_clean_process(library.name, folder, job)
        theirs = load_file(job / reload.THEIRS)
    assert theirs.keys() == {str(i) for i in range(len(calls))}, theirs.keys()
    return max((difference(library.name, call.ours, theirs[str(i)]) for i, call in enumerate(calls)), default=0.0)


def difference(by: str, ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of a coordinate between embeddings (n, D), divided by the L2 norm of our row.

    by: what computed `theirs`, for the message. Raises AssertionError for a difference above TOLERANCE.
    """
    length = ours.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(ours.dtype).tiny)
    distance = float(((ours - theirs) / length).abs().max())
    assert distance <= TOLERANCE, f"{by} gives other embeddings than the run, by up to {distance}"
    return distance


def in_a_clean_process(library: str, folder: Path, job: Path) -> None:
    """Run reload.py in a process without network, GPU, model caches and modules of this project.

    library: a key of LIBRARIES in reload.py. folder: the export that the library loads. job: working folder, with the
    input files that the docstring of reload.py names; the output, theirs.safetensors, is written there. Raises
    ConfigError when the process ends with an error, such as that the library cannot load `folder`, HardwareError when
    it is killed.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    environment |= dict.fromkeys(("HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME"), str(job))
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", reload.__file__, library, str(folder), str(job)]
    done = subprocess.run(command, env=environment, cwd=job, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode < 0:
        raise HardwareError(
            f"the process in which {library} loads the export was killed (signal {-done.returncode}): is there memory "
            "for a second copy of the model? Export on a larger machine"
        )
    if done.returncode:
        output = done.stderr.strip().splitlines() or ["it printed no error"]
        raise ConfigError(f"{library} cannot load what was written, in a process without a network: {output[-1]}")
