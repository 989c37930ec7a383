"""format=torch: write a model of sequences as a folder that torch loads without other model libraries.

The folder holds the embeddings of all items and the weights of the context network.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.eval.encode.encoder import Encoder
from dyad.export.library import Call, ExportSource, Library, difference, render
from dyad.recommend import Recommender, build_recommender
from dyad.sequence_folder import About, read_sequence_folder, write_sequence_folder
from dyad.train.distributed.world import World
from dyad.train.towers.models import SequenceModel
from dyad.train.towers.sequence import HistoryEncoder, SequenceTower

HISTORIES = ([0], [1, 0, 1], [0, 1, 2, 1, 0])  # of the check: numbers of items, modulo the number of items


def write(folder: Path, source: ExportSource) -> None:
    """Write the embeddings of all items and the context network into `folder` (dyad/sequence_folder.py).

    All items are embedded for it. The folder is then read as `dyad.load` reads it, and its contexts are compared with
    ours. Raises ConfigError for a model of another task than sequence, and for a model of frames; ConfigError or
    DataError if the training log, which has the ids of the items, cannot be read; AssertionError if contexts differ.
    """
    tower, made = _checked(source)
    context, own = tower.next_network, source.config.model.context
    about = About(str(context.kind), own.layers, own.heads, context.inside, made.length, made.cosine)
    write_sequence_folder(folder, about, context, made.items_ND, made.items.names)
    loaded = cast(SequenceTower, read_sequence_folder(str(folder)).model.towers.x_tower)
    for (_, ours), (_, theirs) in zip(_contexts(tower, made), _contexts(loaded, made), strict=True):
        difference("dyad.load", ours, theirs)


def calls(source: ExportSource) -> Iterator[Call]:
    """Yield a Call for each of the HISTORIES for the check of the export, with our context vector, (1, D).

    Raises the errors of `write`.
    """
    for numbers, ours in _contexts(*_checked(source)):
        yield Call(ours, hints={"history": numbers})


def snippet(folder: Path, source: ExportSource) -> str:
    """Return Markdown that shows how to load the folder and recommend items."""
    network = cast(SequenceTower, source.model.towers.x_tower).next_network
    layers = [name for name in ("enter", "leave") if isinstance(getattr(network, name), nn.Linear)]
    return render("torch.md.j2", folder, source, width=network.inside, linear=layers)


def _contexts(tower: SequenceTower, made: Recommender) -> Iterator[tuple[list[int], Tensor]]:
    """Yield each of the HISTORIES as numbers of items, and its context vector by `tower`, (1, D)."""
    count = len(made.items_ND)
    for history in HISTORIES:
        numbers = [number % count for number in history]
        with torch.no_grad():
            context = HistoryEncoder(tower, made.items_ND)(torch.tensor([numbers]))
        yield numbers, context


def _checked(source: ExportSource) -> tuple[SequenceTower, Recommender]:
    """Return the tower of `source` in eval mode, and a Recommender, for which all items are embedded.

    Raises the errors of `write`.
    """
    if not isinstance(source.model, SequenceModel):
        raise ConfigError("format=torch: only models of task=sequence can be exported. Leave format out")
    encoder, tower = Encoder.of(source.config, source.model, World()), source.model.towers.x_tower.eval()
    return cast(SequenceTower, tower), build_recommender(source.config, source.model, encoder)


FRONT = {"library_name": "pytorch", "tags": ["sequential-recommendation"]}
LIBRARY = Library("torch", FRONT, "model of sequences", write, calls, snippet)
