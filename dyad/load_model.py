"""Open a model for Python, by its name: a run, an export, or a model of another library."""

import os
from dataclasses import replace
from os import PathLike

import torch

from dyad import inputs
from dyad.data.base.errors import ConfigError
from dyad.data.base.progress import print_on_rank_0
from dyad.eval.encode.encoder import Encoder
from dyad.evaluation.find_model import find_model
from dyad.evaluation.load_run import LoadedRun
from dyad.model import Model
from dyad.train.distributed.world import World
from dyad.train.towers.heads import representation


def load(
    name: str | PathLike[str],
    device: str | torch.device | None = None,
    *,
    block: int | None = None,
    workers: int = 0,
    width: int | None = None,
) -> Model:
    """Load a model by name: "runs/NAME", a checkpoint or an export folder, "open_clip:NAME@WEIGHTS", "st:FOLDER", ….

    name: in any form that `python -m eval --help` lists for model=; a folder may be a Path. Published weights that the
    cache lacks are downloaded. device: None for the GPU if there is one, else the CPU. block: how many items a tower
    embeds at a time; None: the value of the run, 256 for other models. workers: number of processes that prepare
    inputs; 0: this process does. width: embeddings have only so many of their first numbers, for a model trained with
    objective.matryoshka; None: all, as in exports; eval.width of a run is of evaluations alone. A line on stderr says
    that a run was not trained with this width. Raises ConfigError for a name that is no model, for a device that torch
    cannot use, and for a block or width below 1; ConfigError or DataError for damaged files. A width above that of the
    model's embeddings is refused when something is embedded.
    """
    if not isinstance(name, str | PathLike):
        raise ConfigError(f"name={name!r:.80} must be a str or a path, such as 'runs/NAME'")
    device = inputs.device_of(device)
    found = find_model(os.fspath(name)).load()
    data, options = replace(found.config.data, workers=workers), found.config.eval
    block = options.block if block is None else inputs.count_of(block, "block")
    width = None if width is None else inputs.count_of(width, "width")
    trained = [*getattr(found.config.objective, "matryoshka", []), found.config.model.embed_dim]
    if width and isinstance(found, LoadedRun) and width not in trained:
        why = "its first numbers were not trained to be an embedding of their own"
        print_on_rank_0(f"width={width}: objective.matryoshka of {found.run} lacks it, so {why}")
    config = replace(found.config, data=data, eval=replace(options, block=block, width=width or options.width))
    world = World(device=device)
    found.model.towers.eval()  # no call changes the mode then, and threads share the model
    encoder = replace(Encoder.of(config, representation(found.model), world), width=width)
    return Model(replace(found, config=config), encoder)
