"""Recommend the items that come next after a history, by comparing the context vector of the history with all items."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dyad.data.base.errors import ConfigError, nearest
from dyad.data.config import ItemKind
from dyad.data.sequence.histories import ItemList, padded
from dyad.data.sequence.items import CatalogueItems, ItemNumbers
from dyad.data.sequence.open import items_of, known_ids
from dyad.eval.encode.encoder import Encoder
from dyad.eval.search.index import Index
from dyad.train.config import TrainConfig
from dyad.train.towers.models import SequenceModel
from dyad.train.towers.sequence import HistoryEncoder, SequenceTower


@dataclass(frozen=True)
class Recommender:
    """Finds the next items of histories.

    items: the N items that can be found. items_ND: their embeddings, float32 (N, D), not normalised, on the CPU.
    encoder: runs the model; contexts and items are compared by their first `encoder.width` numbers. length: the most
    items of a history that are used; of a longer history, only the last ones are. cosine: whether contexts and items
    are compared by cosine; else by inner product.
    """

    items: CatalogueItems
    items_ND: Tensor
    encoder: Encoder
    length: int
    cosine: bool

    def __call__(self, histories: Sequence[Sequence[str]], k: int, drop_seen: bool) -> list[list[tuple[float, str]]]:
        """Return for each history a list of (score, id) of the k items with the highest scores, best first.

        A list is shorter if fewer than k items are left. histories: ids of items, oldest first; ids that the model does
        not know are left out, as in the evaluation. drop_seen: whether to leave out all items of the history, also
        those before its last `length`. Raises ConfigError for a history without a known id.
        """
        numbers = self.numbers(histories)
        contexts = self.contexts(numbers)
        hidden = [{*history} if drop_seen else set[int]() for history in numbers]
        hits = self._index.search(contexts, k + max(map(len, hidden)))
        found = [
            [(i, score) for i, score in hits.found(row) if i not in hidden[row]][:k] for row in range(len(numbers))
        ]
        return [[(score, self.items.names[i]) for i, score in row] for row in found]

    def numbers(self, histories: Sequence[Sequence[str]]) -> list[list[int]]:
        """Return for each history the positions in `items` of its ids; ids that the model does not know are left out.

        Raises ConfigError for a history without a known id.
        """
        numbers = [[self._numbers[name] for name in history if name in self._numbers] for history in histories]
        if [] in numbers:
            name = histories[empty := numbers.index([])][0]
            hint = nearest(name, self.items.names)
            raise ConfigError(f"history {empty}: the model knows none of its items, such as '{name:.80}'.{hint}")
        return numbers

    def vectors(self, names: Sequence[str]) -> np.ndarray:
        """Return the vectors of n items by which they are compared, float32 (n, D): cut, and normalised if `cosine`.

        Raises ConfigError for an id that the model does not know.
        """
        if unknown := [name for name in names if name not in self._numbers]:
            raise ConfigError(
                f"the model does not know the item '{unknown[0]:.80}'.{nearest(unknown[0], self.items.names)}"
            )
        return self._compared_ND[[self._numbers[name] for name in names]]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.items.names)}

    @cached_property
    def _compared_ND(self) -> np.ndarray:
        items_ND = self.items_ND[:, : self.encoder.width]
        return (F.normalize(items_ND, dim=-1) if self.cosine else items_ND).numpy()

    @cached_property
    def _index(self) -> Index:
        return Index(self._compared_ND)

    def contexts(self, numbers: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the context vectors of n histories, float32 (n, D), normalised if `cosine`. D: encoder.width, if set.

        numbers: for each history, the positions of its items in `items`, oldest first; at least one. Only the last
        `length` count.
        """
        last = padded([np.array(history[-self.length :]) for history in numbers])
        of = HistoryEncoder(cast(SequenceTower, self.encoder.towers["x"]), self.items_ND.to(self.encoder.world.device))
        return replace(self.encoder, towers={"x": of}, cosine=self.cosine)("x", _Rows(last))


def contexts_of_frames(encoder: Encoder, frames: Sequence[np.ndarray]) -> np.ndarray:
    """Return the contexts at the last frames of n sequences, float32 (n, D), not normalised.

    frames: n float32 arrays (T, F) of T ≥ 1 frames with F features.
    """
    whole = replace(encoder, cosine=False, width=None)
    of_frames = torch.from_numpy(whole("y", _Rows(torch.from_numpy(np.concatenate(frames)))))
    tower = cast(SequenceTower, encoder.towers["x"])
    of = HistoryEncoder(tower, of_frames.to(encoder.world.device), ahead=False)
    ends = np.cumsum([len(each) for each in frames])
    rows = padded([np.arange(end - len(each), end) for end, each in zip(ends, frames, strict=True)])
    return replace(whole, towers={"x": of})("x", _Rows(rows))


@dataclass(frozen=True)
class _Rows:
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def block(self, start: int, stop: int) -> Tensor:
        return self.rows[start:stop]


def build_recommender(config: TrainConfig, model: SequenceModel, encoder: Encoder) -> Recommender:
    """Make a Recommender: embed all items that the model knows.

    These are the items of its export, or else of its training log, which is read again (config.data.train). encoder:
    runs the model; its `cosine` and `width` say how items are compared. Raises ConfigError if the model is of frames
    (data.items=frames); ConfigError or DataError if the log, or the text or image of an item, cannot be read.
    """
    if config.data.items is ItemKind.frames:
        raise ConfigError(
            "this model is of frames (data.items=frames), which are no items of a catalogue. Python: load the run, "
            "and call encode_sequence"
        )
    names = known_ids(config.data, model.names, config.run.inputs)
    items = ItemNumbers(names) if model.names else items_of(names, config.data, model)
    embeddings = replace(encoder, cosine=False, width=None)("y", ItemList(items))  # contexts are of whole embeddings
    return Recommender(items, torch.from_numpy(embeddings), encoder, config.data.sequence.length, encoder.cosine)
