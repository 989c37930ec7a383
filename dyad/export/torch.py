"""format=torch: write a model of sequences as a folder that torch loads without other model libraries.

The folder holds the embeddings of all items and the weights of the context network.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch

from dyad.data.base.errors import ConfigError
from dyad.eval.encode.encoder import Encoder
from dyad.export.library import Call, ExportSource, Library, render
from dyad.recommend import Recommender, build_recommender
from dyad.sequence_folder import About, write_sequence_folder
from dyad.train.distributed.world import World
from dyad.train.towers.models import SequenceModel
from dyad.train.towers.sequence import HistoryEncoder, SequenceTower

HISTORIES = ([0], [1, 0, 1], [0, 1, 2, 1, 0])  # of the check: numbers of items, modulo the number of items


def write(folder: Path, source: ExportSource) -> None:
    """Write the embeddings of all items and the context network into `folder` (dyad/sequence_folder.py).

    All items are embedded for it. Raises ConfigError for a model of another task than sequence, and for a model of
    frames; ConfigError or DataError if the training log, which has the ids of the items, cannot be read.
    """
    tower, made = _checked(source)
    context, own = tower.next_network, source.config.model.context
    about = About(str(context.kind), own.layers, own.heads, context.inside, made.length, made.cosine)
    write_sequence_folder(folder, about, context, made.items_ND, made.items.names)


def calls(source: ExportSource) -> Iterator[Call]:
    """Yield a Call for each of the HISTORIES for the check of the export, with our context vector, (1, D).

    Raises the errors of `write`.
    """
    tower, made = _checked(source)
    count = len(made.items_ND)
    for history in HISTORIES:
        numbers = [number % count for number in history]
        with torch.no_grad():
            ours = HistoryEncoder(tower, made.items_ND)(torch.tensor([numbers]))
        yield Call(ours, hints={"history": numbers})


def snippet(folder: Path, source: ExportSource) -> str:
    """Return Markdown that shows how to load the folder and recommend items."""
    return render("torch.md.j2", folder, source)


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
