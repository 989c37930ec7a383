"""Questions and passages out of rows: batches for training, texts for evaluation.

A row has a question, right passages and perhaps lists of wrong ones. Training draws one right passage and up to
data.negatives.per_row hard negatives, by (seed, epoch, id) alone; what is known to be right for a row is no hard
negative of it, whatever a list says, and goes along as `Batch.known`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch, Extra, Known
from data.config import DataConfig, DrawnPositives, NegativeList, PassageConfig, QuestionConfig
from data.corpus import Chosen, Corpus
from data.errors import ConfigError
from data.keys import Int64s
from data.negatives import Mined
from data.passages import Inline, Passage, Passages, Rendered
from data.questions import Questions, Row
from data.substitutes import Substitutes
from data.transforms import uniforms
from data.workers import at

NOTHING = Inline(())


class TokenizeTexts(Protocol):
    """n texts, or pairs of them → int64 (n, L), right-padded; L fits the longest and is at most `length`."""

    def __call__(self, texts: list[str], length: int, pairs: list[str] | None = None) -> Tensor: ...


def tokens(rendered: Sequence[Rendered], tokenize: TokenizeTexts, length: int) -> Tensor:
    """(n, L) of texts or of pairs: all rows are one or the other."""
    pairs = [second for _, second in rendered if second is not None]
    return tokenize([first for first, _ in rendered], length, pairs or None)


@dataclass(frozen=True)
class Drawn:
    """What row i gives to a batch. extra: further passages, their keys, and whether each is a further positive."""

    i: int
    row: Row
    positive: Passage
    key: int
    extra: list[tuple[Passage, int, bool]]
    known: list[int]


class QuestionPassage:
    """Training pairs by position (epoch, row); all depends on nothing but seed, position, rows and mined negatives."""

    def __init__(
        self, questions: Questions, tokenize: TokenizeTexts, config: DataConfig, seed: int, mined: Mined | None
    ) -> None:
        """Raises ConfigError when mined negatives are asked for and there are none and will be none."""
        negatives = config.negatives
        if negatives.per_row and NegativeList.mined in negatives.lists and not (mined or negatives.refresh_every):
            raise ConfigError("data.negatives.lists has 'mined': set data.negatives.file, or refresh_every.")
        if negatives.refresh_every and questions.corpus is None:
            raise ConfigError("data.negatives.refresh_every: set data.passage.corpus, the passages to search by id.")
        self.questions, self.tokenize, self.config, self.seed, self.mined = questions, tokenize, config, seed, mined
        self._substitutes = Substitutes(questions.sizes, seed, config.tolerated)

    def __len__(self) -> int:
        return len(self.questions)

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        """Raises DataError, naming the file, for one that cannot be read, and for too many damaged rows in a row."""
        drawn, bad = self._substitutes.all(positions, self.drawn, self.questions.origin)
        config = self.config
        extra = [(row, *entry) for row, one in enumerate(drawn) for entry in one.extra]
        passages = [one.positive for one in drawn] + [passage for _, passage, _, _ in extra]
        y = tokens([passage.rendered(config.passage) for passage in passages], self.tokenize, config.passage.length)
        questions = [one.row.question for one in drawn]
        known = [(row, key) for row, one in enumerate(drawn) for key in one.known]
        return Batch(
            x=tokens(
                [question.rendered(config.question) for question in questions], self.tokenize, config.question.length
            ),
            y=y[: len(drawn)],
            sample_ids=torch.tensor([one.i for one in drawn]),
            x_keys=torch.tensor([question.key for question in questions]),
            y_keys=torch.tensor([one.key for one in drawn]),
            extra=self._extra(y[len(drawn) :], extra),
            known=Known(*torch.tensor(known, dtype=torch.int64).reshape(-1, 2).unbind(1)),
            bad=bad,
        )

    def place(self, sample_id: int) -> str:
        return f"row {sample_id} of data.train"

    def drawn(self, epoch: int, i: int) -> Drawn:
        """The passages of row i in an epoch, from 1 + data.negatives.per_row uniforms of its own.

        Raises SampleError when the row, or a passage that it names, is not as it was indexed.
        """
        at(i)
        row, config = self.questions.row(i), self.config
        draws = uniforms(self.seed, epoch, i, 1 + config.negatives.per_row)
        keys = row.positives.keys
        first = config.passage.positives is DrawnPositives.first
        chosen = 0 if first else int(draws[0] * len(keys))
        extra: list[tuple[Passage, int, bool]] = []
        if config.passage.positives is DrawnPositives.all:
            extra += [(row.positives[j], keys[j], True) for j in _new(keys, {keys[chosen]})]
        if config.negatives.per_row:
            extra += self._negatives(row, i, set(keys), draws[1:])
        return Drawn(i, row, row.positives[chosen], keys[chosen], extra, list(dict.fromkeys(keys)))

    def _negatives(self, row: Row, i: int, right: set[int], draws: np.ndarray) -> list[tuple[Passage, int, bool]]:
        """Some of the first list that has any; all when it has no more than are asked for."""
        for name in self.config.negatives.lists:
            listed = self._listed(name, row, i)
            keys = listed.keys
            if pool := _new(keys, right):
                return [(listed[j], keys[j], False) for j in sampled(pool, draws)]
        return []

    def _listed(self, name: NegativeList, row: Row, i: int) -> Passages:
        if name is NegativeList.hard_negatives:
            return row.hard_negatives
        if name is NegativeList.negatives:
            return row.negatives
        return NOTHING if self.mined is None else Chosen(self.mined.corpus, self.mined.positions(i))

    def _extra(self, y: Tensor, entries: list[tuple[int, Passage, int, bool]]) -> Extra | None:
        """None when the configuration has no further passages, whatever the rows; else k ≥ 0 of them."""
        if not self.config.negatives.per_row and self.config.passage.positives is not DrawnPositives.all:
            return None
        return Extra(
            y=y,
            row=torch.tensor([row for row, _, _, _ in entries], dtype=torch.int64),
            keys=torch.tensor([key for _, _, key, _ in entries], dtype=torch.int64),
            positive=torch.tensor([positive for _, _, _, positive in entries], dtype=torch.bool),
        )


def _new(keys: Sequence[int], seen: set[int]) -> list[int]:
    """Positions of keys that are neither in `seen` nor earlier in the list."""
    first = {key: i for i, key in reversed(list(enumerate(keys))) if key not in seen}
    return sorted(first.values())


def sampled(pool: Sequence[int], draws: Sequence[float] | np.ndarray) -> list[int]:
    """As many of `pool` as there are uniforms, without replacement (Fisher and Yates); all if it has fewer."""
    left = list(pool)
    for place, draw in enumerate(draws[: len(left)]):
        other = place + int(draw * (len(left) - place))
        left[place], left[other] = left[other], left[place]
    return left[: len(draws)]


# Evaluation -----------------------------------------------------------------------------------------------------------


class Source(Protocol):
    """Texts by position, rendered when they are asked for. lengths: (n,) bytes of each, to sort by without reading."""

    @property
    def lengths(self) -> Int64s: ...
    def __len__(self) -> int: ...
    def rendered(self, i: int) -> Rendered: ...


@dataclass(frozen=True)
class PassageTexts:
    """The passages of a corpus."""

    corpus: Corpus
    config: PassageConfig

    @property
    def lengths(self) -> Int64s:
        return self.corpus.lengths

    def __len__(self) -> int:
        return len(self.corpus)

    def rendered(self, i: int) -> Rendered:
        return self.corpus[i].rendered(self.config)


@dataclass(frozen=True)
class QuestionTexts:
    """The questions of some rows."""

    questions: Questions
    config: QuestionConfig

    @property
    def lengths(self) -> Int64s:
        return self.questions.lengths

    def __len__(self) -> int:
        return len(self.questions)

    def rendered(self, i: int) -> Rendered:
        return self.questions.question(i).rendered(self.config)


@dataclass(frozen=True)
class Texts:
    """n texts or pairs of texts as tower inputs, read, rendered and tokenised when they are asked for."""

    source: Source
    tokenize: TokenizeTexts
    length: int

    @property
    def lengths(self) -> Int64s:
        return self.source.lengths

    def __len__(self) -> int:
        return len(self.source)

    def block(self, start: int, stop: int) -> Tensor:
        """(k, L) tokens of texts [start, stop)."""
        return self.take(range(start, min(stop, len(self))))

    def take(self, positions: Sequence[int] | Int64s) -> Tensor:
        """(k, L) tokens of texts by position."""
        return tokens([self.source.rendered(int(i)) for i in positions], self.tokenize, self.length)


def passage_texts(corpus: Corpus, tokenize: TokenizeTexts, config: PassageConfig) -> Texts:
    return Texts(PassageTexts(corpus, config), tokenize, config.length)


def question_texts(questions: Questions, tokenize: TokenizeTexts, config: QuestionConfig) -> Texts:
    return Texts(QuestionTexts(questions, config), tokenize, config.length)
