"""Embeddings of histories: cut ones, eval.width, are the first numbers of whole ones."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dyad.data.config import SequenceConfig
from dyad.data.sequence.histories import next_items
from dyad.data.sequence.items import ItemNumbers
from dyad.data.sequence.log import read_log
from dyad.eval.encode.encoder import Encoder
from dyad.eval.encode.histories import encode_histories
from dyad.train.context_config import ContextConfig
from dyad.train.distributed.world import World
from dyad.train.towers.sequence import ContextNetwork, SequenceTower
from dyad.train.towers.tower import Tower

USERS, WIDTH = 5, 8


class Items(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.table(numbers.view(-1).long())


@pytest.mark.parametrize("cosine", [True, False])
def test_cut_embeddings_are_the_first_numbers_of_whole_ones(cosine: bool, tmp_path: Path) -> None:
    for part, times in {"train": range(3), "val": [3]}.items():
        rows = [f"u{user},i{(user + time) % 6},{time}" for user in range(USERS) for time in times]
        (tmp_path / f"{part}.csv").write_text("\n".join(["user,item,time", *rows]))
    log = read_log([str(tmp_path / "train.csv"), str(tmp_path / "val.csv")], SequenceConfig())
    histories = next_items(log, ItemNumbers(log.items), 4, 1, 1)
    tower = SequenceTower(Tower(Items(), nn.Identity()), ContextNetwork(ContextConfig(), WIDTH))
    encode = Encoder({"x": tower, "y": tower}, World(), cosine=cosine)
    of_whole, of_cut = encode_histories(encode, histories), encode_histories(replace(encode, width=4), histories)
    for whole, cut in zip(of_whole, of_cut, strict=True):
        first = torch.from_numpy(whole[:, :4])
        np.testing.assert_allclose(cut, F.normalize(first, dim=1) if cosine else first, rtol=1e-5, atol=1e-6)
