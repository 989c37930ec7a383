"""Embeddings of histories (sequences of items): the context, the output of the x tower, at the last item of each."""

from dataclasses import replace
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from dyad.data.sequence.histories import Histories, ItemList
from dyad.eval.encode.encoder import Encoder
from dyad.train.towers.sequence import HistoryEncoder, SequenceTower


def encode_histories(encode: Encoder, histories: Histories) -> tuple[np.ndarray, np.ndarray]:
    """Return the embeddings of n histories, float32 (n, D), and of all N items they may contain, float32 (N, D).

    All processes must call it together. encode: its x tower must be a SequenceTower. The score of an item as the next
    one is the dot product of the embeddings of history and item, which are L2-normalised if encode.cosine is True. For
    objective=cpc the embedding of a history is W_1 c, the learnt projection of its context c by which the next item is
    predicted. With encode.features the first array has the contexts c themselves for every objective; their width may
    differ from D. D is encode.width, if it is set, without encode.features.
    """
    width = None if encode.features else encode.width
    whole = replace(encode, cosine=False, features=False, width=None)("y", ItemList(histories.items))
    of_items = torch.from_numpy(whole).to(encode.world.device)  # the context network reads whole embeddings
    tower = HistoryEncoder(cast(SequenceTower, encode.towers["x"]), of_items, ahead=not encode.features)
    x_nD = replace(encode, towers={"x": tower}, features=False, width=width)("x", histories)
    items_ND = of_items[:, :width]
    return x_nD, (F.normalize(items_ND, dim=-1) if encode.cosine else items_ND).cpu().numpy()
