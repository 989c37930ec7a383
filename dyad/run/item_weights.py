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


def check_item_weights(
    objective: Objective, dataset: BatchSource | Stream, samples: int, manifest: Manifest
) -> list[str]:
    """Check that the objective's file of one number per y item has the items of the first samples.

    Returns at most one line for the log: that the file was made of other data than these. Returns [] for an objective
    without such a file, and for a stream, of which nothing is checked. dataset: the training data, of which the first
    LOOKED_UP samples are read. samples: the number of all its samples. manifest: the files of the data. Raises
    DataError if the file lacks an item of these samples, or if its record of its data is damaged.
    """
    table = getattr(objective, "table", None)
    if not isinstance(table, ItemTable) or isinstance(dataset, Stream):
        return []
    batch = dataset.__getitems__([(0, i) for i in range(min(samples, LOOKED_UP))])
    extra = [] if batch.extra is None else [batch.extra.keys]
    table.weights.of(torch.cat([batch.y_keys, *extra]).numpy())
    if differences := describe_data_changes(table.weights, manifest):
        return [f"{table.weights.path} was made of other data ({differences}): an item that it lacks ends the run"]
    return []


def describe_data_changes(weights: LogWeights, manifest: Manifest) -> str:
    """Describe how the data from which a file of numbers was made differ from the present data.

    Returns "" if they do not differ, or if the file does not record its data. weights: the file. manifest:
    configuration key → the present files; only keys that the file records are compared. Raises DataError if the record
    is damaged.
    """
    made_of = weights.facts.get("data", {})
    try:
        found = changes(made_of, {key: manifest.get(key, ()) for key in made_of})
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{weights.path}: what it says of its data is damaged. Make it anew") from error
    added = {key: f"{count:,} samples were added since" for key, count in found.added.items()}
    return "; ".join(f"{key}: {difference}" for key, difference in {**found.different, **added}.items())
