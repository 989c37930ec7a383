"""What the formats of an export share: what is exported, and how a library's embeddings are compared with our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.errors import ConfigError, HardwareError
from train.config import TrainConfig
from train.export import reload
from train.panels import Scored
from train.towers.build import Model

TOLERANCE = 1e-5  # of a row's length: another order of summation, not another model
PROBES = ["a red circle", "Grüße aus Köln", "wheel of dharma, religion, Buddhist"]


@dataclass(frozen=True)
class Source:
    """A trained model. name: of its run; logit_scale: log 1/τ as it was learnt, None to keep the library's own.

    step: it was trained for, None when nobody knows; results: scores of the evaluations at that step.
    """

    name: str
    config: TrainConfig
    model: Model
    logit_scale: float | None = None
    step: int | None = None
    results: Sequence[Scored] = ()


@dataclass(frozen=True)
class Call:
    """Texts (n; of pairs the second halves too) or pictures, uint8 (n, 3, S, S), that a library is to embed.

    ours: what must come out, (n, D); hints: what the library's part of reload.py asks for.
    """

    ours: Tensor
    texts: Sequence[str] = ()
    pairs: Sequence[str] | None = None
    pictures: Tensor | None = None
    hints: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Library:
    """One format. name: of the library that loads it, a key of reload.LIBRARIES; kind: what the card calls the model;
    front: the hub's words for it (library_name, pipeline_tag, tags).

    write: fills a folder, ConfigError when it has no place for such a model; calls: what the library is asked, to see
    that it has the same model; snippet: how to load it.
    """

    name: str
    front: Mapping[str, Any]
    kind: str
    write: Callable[[Path, Source], None]
    calls: Callable[[Source], Iterable[Call]]
    snippet: Callable[[Path, Source], str]


def probe_pictures(size: int) -> Tensor:
    """Noise, uint8 (3, 3, S, S)."""
    return torch.randint(0, 256, (3, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def difference(library: Library, folder: Path, source: Source) -> float:
    """The largest one between the model's embeddings and those of what the library loads from `folder`, by itself.

    As a share of a row's length. ConfigError when the library cannot load it, AssertionError when it is another model.
    """
    calls = list(library.calls(source))
    with TemporaryDirectory() as place:
        job = Path(place)
        asked = [{"texts": list(call.texts), "pairs": call.pairs and list(call.pairs), **call.hints} for call in calls]
        (job / reload.CALLS).write_text(json.dumps(asked))
        given = {str(i): call.pictures for i, call in enumerate(calls) if call.pictures is not None}
        save_file(given, job / reload.GIVEN)
        in_a_clean_process(library.name, folder, job)
        theirs = load_file(job / reload.THEIRS)
    answered = {name.partition("/")[0] for name in theirs}
    assert answered == {str(i) for i in range(len(calls))}, answered
    return max(_distance(library.name, calls[int(name.partition("/")[0])].ours, rows) for name, rows in theirs.items())


def in_a_clean_process(library: str, folder: Path, job: Path) -> None:
    """reload.py with nothing but the folder: no network, empty caches of models, none of our code."""
    empty = str(job)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    places = {"HF_HOME": empty, "TORCH_HOME": empty, "XDG_CACHE_HOME": empty}
    alone = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", reload.__file__, library, str(folder), str(job)]
    done = subprocess.run(
        command, env={**kept, **places, **alone}, cwd=job, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode < 0:
        raise HardwareError(
            f"the process in which {library} loads the export was killed (signal {-done.returncode}): is there memory "
            "for a second copy of the model? Export on a larger machine"
        )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise ConfigError(f"{library} cannot load what was written, in a process without a network: {said[-1]}")


def _distance(library: str, ours: Tensor, theirs: Tensor) -> float:
    length = ours.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(ours.dtype).tiny)
    distance = float(((ours - theirs) / length).abs().max())
    assert distance <= TOLERANCE, f"{library} gives other embeddings than the run, by up to {distance}"
    return distance
