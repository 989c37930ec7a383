"""Embeddings of histories: the contexts at their last items."""

from dataclasses import replace
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from dyad.data.sequence.histories import Histories, ItemList
from dyad.eval.encode.encoder import Encoder
from dyad.train.towers.sequence import OfHistory, SequenceTower


def encode_histories(encode: Encoder, histories: Histories) -> tuple[np.ndarray, np.ndarray]:
    """Return the embeddings of n histories, float32 (n, D), and of all N items, (N, D). All processes call it together.

    Those of histories are compared with those of items. If `encode` takes features, they are the contexts themselves,
    of whatever width, also where CPC compares W_1 c.
    """
    items_ND = replace(encode, cosine=False, features=False)("y", ItemList(histories.items))
    of_items = torch.from_numpy(items_ND).to(encode.world.device)
    tower = OfHistory(cast(SequenceTower, encode.towers["x"]), of_items, ahead=not encode.features)
    x_nD = replace(encode, towers={"x": tower}, features=False)("x", histories)
    return x_nD, F.normalize(of_items, dim=-1).cpu().numpy() if encode.cosine else items_ND
