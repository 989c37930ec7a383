"""Check, before a run begins, that the objective's file of numbers by content key was made for the training data.

Such a file holds one number for each y item, such as log q, which is found by the hash of the item's content.
"""

import torch

from dyad.data.base.errors import DataError
from dyad.data.image_text.stream import Stream
from dyad.data.loading.loader import BatchSource
from dyad.data.log_weights import LogWeights
from dyad.data.shards.manifest import Manifest, changes
from dyad.train.losses.gathered.importance import ItemTable
from dyad.train.losses.objectives.base import Objective

LOOKED_UP = 64  # the first samples are looked up before the run folder is made, to find a file of other data early


def notes_on_weights(
    objective: Objective, dataset: BatchSource | Stream, samples: int, manifest: Manifest
) -> list[str]:
    """Return lines for the log, at most one, on the objective's file of one number per y item; [] if it has none.

    dataset: the training data, with `samples` samples; of a stream nothing is checked. manifest: the files of the data.
    Raises DataError if the objective's file lacks an item of the first LOOKED_UP samples.
    """
    table = getattr(objective, "table", None)
    if not isinstance(table, ItemTable) or isinstance(dataset, Stream):
        return []
    batch = dataset.__getitems__([(0, i) for i in range(min(samples, LOOKED_UP))])
    extra = [] if batch.extra is None else [batch.extra.keys]
    table.weights.of(torch.cat([batch.y_keys, *extra]).numpy())
    if differences := made_of_other_data(table.weights, manifest):
        return [f"{table.weights.path} was made of other data ({differences}): an item that it lacks ends the run"]
    return []


def made_of_other_data(weights: LogWeights, manifest: Manifest) -> str:
    """Return how the files that the weights were made from differ from those of the manifest; "" if they do not, or if
    the weights do not record their files. Raises DataError if that record is damaged."""
    made_of = weights.facts.get("data", {})
    try:
        found = changes(made_of, {key: manifest.get(key, ()) for key in made_of})
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{weights.path}: what it says of its data is damaged. Make it anew") from error
    added = {key: f"{count:,} samples were added since" for key, count in found.added.items()}
    return "; ".join(f"{key}: {difference}" for key, difference in {**found.different, **added}.items())
