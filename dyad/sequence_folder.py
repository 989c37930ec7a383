"""Write and read the export folder of a model of sequences. Of model libraries, only torch is needed to load it.

model.safetensors holds the embeddings of N items, `trunk.weight` (N, D), and the weights of the context network,
`context.…`. sequence.json holds the shape of the network, items.txt one id per line. The folder stores finished
embeddings, also if a tower of texts or images computed them, so the loaded model takes ids of items only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError, first_line
from dyad.data.base.files import checked_path, open_foreign, write_json
from dyad.data.base.json_text import read_json
from dyad.data.base.limits import check_limits
from dyad.data.config import DataConfig, ItemKind, SequenceConfig
from dyad.evaluation.load_run import LoadedModel
from dyad.train.config import ModelConfig, RunConfig, Task, TrainConfig
from dyad.train.context_config import ContextConfig, ContextKind
from dyad.train.losses.options.choices import Similarity
from dyad.train.losses.options.registry import configure
from dyad.train.towers.models import SequenceModel
from dyad.train.towers.sequence import ContextNetwork, SequenceTower
from dyad.train.towers.tower import Tower, TwoTower

ABOUT, WEIGHTS, ITEMS = "sequence.json", "model.safetensors", "items.txt"
# errors of reading files that `write_sequence_folder` has not written so
DAMAGED = (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, SafetensorError, ConfigError)


@dataclass(frozen=True)
class About:
    """The content of sequence.json: settings that the shapes of the weights do not determine.

    kind, layers, heads: the kind of the context network, its number of layers, and of attention heads. width: width of
    its states. length: the most items of a history that are used; of a longer history, only the last ones are. cosine:
    whether contexts and items are compared by cosine; else by inner product.
    """

    kind: str
    layers: int
    heads: int
    width: int
    length: int
    cosine: bool


def write_sequence_folder(
    folder: Path, about: About, context: ContextNetwork, items_ND: Tensor, names: Sequence[str]
) -> None:
    """Write a model of sequences into the existing folder `folder`, as the three files ABOUT, WEIGHTS and ITEMS.

    items_ND: embeddings of N items, (N, D), not normalised. names: their N ids, none of which has a newline.
    """
    weights = {f"context.{name}": tensor.detach().contiguous() for name, tensor in context.state_dict().items()}
    save_file({"trunk.weight": items_ND.contiguous(), **weights}, folder / WEIGHTS)
    write_json(folder / ABOUT, vars(about))
    (folder / ITEMS).write_bytes("".join(f"{name}\n" for name in names).encode())


def read_sequence_folder(folder: str) -> LoadedModel:
    """Load a model from a folder that `write_sequence_folder` wrote; the files may be untrusted.

    Raises ConfigError for a file that is missing, damaged, or inconsistent with the others. Sizes in sequence.json are
    checked before memory is allocated for them.
    """
    path = Path(folder).expanduser()
    try:
        about = About(**read_json(path / ABOUT, folder=path))
        weights = load_file(checked_path(path / WEIGHTS, folder=path))
        with open_foreign(path / ITEMS, folder=path) as file:
            *names, _ = file.read().decode().split("\n")  # not splitlines: an id may contain other line breaks
        config = _config(about, weights)
        if len(names) != config.run.inputs:
            raise ValueError(f"{ITEMS} has {len(names):,} ids, {WEIGHTS} {config.run.inputs:,} items")
        with torch.device("meta"):
            # of the weights that are there: nn.Embedding would draw them, for which torch imports its compiler
            vectors = nn.Embedding.from_pretrained(weights["trunk.weight"], freeze=False)
            network = ContextNetwork(config.model.context, width := vectors.embedding_dim)
            if "context.leave.weight" in weights:  # that of CPC is there for equal widths too (`followed_by`)
                network.leave = nn.Linear(network.inside, width)
            tower = SequenceTower(Tower(vectors, nn.Identity()), network)
        tower.load_state_dict(weights, assign=True)
    except DAMAGED as error:
        raise ConfigError(f"{folder}: is no export of a model of sequences, or damaged: {first_line(error)}") from error
    model = SequenceModel(TwoTower(tower, tower).eval(), None, None, width, tuple(names))
    return LoadedModel(folder, config, model, None)


def _config(about: About, weights: dict[str, Tensor]) -> TrainConfig:
    count, width = weights["trunk.weight"].shape
    context = ContextConfig(ContextKind(about.kind), about.layers, about.width, about.heads, 0.0)
    check_limits(context, "model.context.")
    similarity = Similarity.cosine if about.cosine else Similarity.dot
    data = DataConfig(items=ItemKind.ids, sequence=SequenceConfig(length=about.length))
    model = ModelConfig(name=None, embed_dim=width, context=context)
    objective = replace(configure("clip"), similarity=similarity)
    return TrainConfig(task=Task.sequence, model=model, data=data, run=RunConfig(inputs=count), objective=objective)
