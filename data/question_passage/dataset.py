"""Questions and passages: batches for training, texts for evaluation.

A row has a question, positive passages and perhaps lists of negative ones. Training draws one positive passage and up
to data.negatives.per_row hard negatives, by (seed, epoch, id) alone. A positive passage of a row is never drawn as its
hard negative, even if a list of negatives contains it; `Batch.known_positives` has all of them.

b rows of a batch; n texts; L tokens of the longest text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dyad.data.base.errors import ConfigError
from dyad.data.batch import Batch, Extra, KnownPositives
from dyad.data.config import DataConfig, DrawnPositives, NegativeList, PassageConfig, QuestionConfig
from dyad.data.image_text.transforms import uniforms
from dyad.data.loading.replacement import Replacements
from dyad.data.question_passage.corpus import Corpus
from dyad.data.question_passage.negatives import MinedNegatives, distinct, draw_negatives
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.question_passage.questions import QuestionRows
from dyad.data.shards.content_keys import Int64s


class TokenizeTexts(Protocol):
    """A tokenizer: n texts, or n pairs of texts → int64 (n, L), padded at the right.

    L is the number of tokens of the longest text, at most `length`. pairs: the second text of each pair.
    """

    def __call__(self, texts: list[str], length: int, pairs: list[str] | None = None) -> Tensor: ...


def tokens(texts: Iterable[Any], tokenize: TokenizeTexts, config: PassageConfig | QuestionConfig) -> Tensor:
    """(n, L) tokens of passages or of questions. With title=pair all of them are pairs of texts, otherwise none is."""
    rendered = [text.rendered(config) for text in texts]
    pairs = [second for _, second in rendered if second is not None]
    return tokenize([first for first, _ in rendered], config.length, pairs or None)


@dataclass(frozen=True)
class DrawnRow:
    """What was drawn of row i for a batch: the question and one positive passage.

    extra: further passages, each with whether it is positive. positive_keys: content ids of all positives of the row.
    """

    i: int
    question: Question
    positive: Passage
    extra: list[tuple[Passage, bool]]
    positive_keys: list[int]


class QuestionPassage:
    """The training data set of question_passage. A batch depends only on the seed, its positions, the rows and the
    mined negatives."""

    def __init__(
        self,
        questions: QuestionRows,
        tokenize: TokenizeTexts,
        config: DataConfig,
        seed: int,
        mined: MinedNegatives | None,
    ) -> None:
        """Raises ConfigError when the configuration asks for mined negatives that neither exist nor will be mined."""
        negatives = config.negatives
        if negatives.per_row and NegativeList.mined in negatives.lists and not (mined or negatives.refresh_every):
            raise ConfigError("data.negatives.lists has 'mined': set data.negatives.file, or refresh_every.")
        if negatives.refresh_every and questions.corpus is None:
            raise ConfigError("data.negatives.refresh_every: set data.passage.corpus, the passages to search by id.")
        self.questions, self.tokenize, self.config, self.seed, self.mined = questions, tokenize, config, seed, mined
        self._replacements = Replacements(questions.sizes, seed, config.tolerated)

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        """The batch of some positions (epoch, row).

        Raises DataError, naming the file, when it cannot be read, and for too many bad rows one after the other.
        """
        drawn, bad = self._replacements.load(positions, self.drawn, self.questions.origin)
        config = self.config
        extra = [(row, *entry) for row, one in enumerate(drawn) for entry in one.extra]
        passages = [one.positive for one in drawn] + [passage for _, passage, _ in extra]
        y = tokens(passages, self.tokenize, config.passage)
        questions = [one.question for one in drawn]
        x = tokens(questions, self.tokenize, config.question)
        known = [(row, key) for row, one in enumerate(drawn) for key in one.positive_keys]
        may_have_extra = config.negatives.per_row or config.passage.positives is DrawnPositives.all
        return Batch(
            x=x,
            y=y[: len(drawn)],
            sample_ids=torch.tensor([one.i for one in drawn]),
            x_keys=torch.tensor([question.key for question in questions]),
            y_keys=torch.tensor([one.positive.key for one in drawn]),
            extra=_extra(y[len(drawn) :], extra) if may_have_extra else None,
            known_positives=KnownPositives(*torch.tensor(known, dtype=torch.int64).reshape(-1, 2).unbind(1)),
            bad=bad,
        )

    def where(self, sample_id: int) -> str:
        return f"row {sample_id} of data.train"

    def drawn(self, epoch: int, i: int) -> DrawnRow:
        """What is drawn of row i in an epoch. It depends on 1 + data.negatives.per_row uniforms of (seed, epoch, i).

        Raises SampleError when the row, or a passage that it names, is not as it was indexed.
        """
        row, config = self.questions.row(i), self.config
        draws = uniforms(self.seed, epoch, i, 1 + config.negatives.per_row)
        keys = row.positives.keys
        chosen = 0 if config.passage.positives is DrawnPositives.first else int(draws[0] * len(keys))
        extra: list[tuple[Passage, bool]] = []
        if config.passage.positives is DrawnPositives.all:
            extra += [(row.positives[j], True) for j in distinct(keys, {keys[chosen]})]
        if config.negatives.per_row:
            extra += [(passage, False) for passage in draw_negatives(row, i, self.mined, config.negatives, draws[1:])]
        return DrawnRow(i, row.question, row.positives[chosen], extra, list(dict.fromkeys(keys)))


def _extra(y: Tensor, entries: list[tuple[int, Passage, bool]]) -> Extra:
    """The further passages of a batch. y (k, L): their tokens; entries: (row, passage, is positive) of each. k may be
    0."""
    return Extra(
        y=y,
        row=torch.tensor([row for row, _, _ in entries], dtype=torch.int64),
        keys=torch.tensor([passage.key for _, passage, _ in entries], dtype=torch.int64),
        positive=torch.tensor([positive for _, _, positive in entries], dtype=torch.bool),
    )


# Evaluation -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextInputs:
    """n passages or questions as tower inputs, read and tokenised on access. Can be pickled.

    item(i): the Passage or Question at position i. lengths (n,): bytes of each, to sort by without reading.
    """

    item: Callable[[int], Any]
    lengths: Int64s
    tokenize: TokenizeTexts
    config: PassageConfig | QuestionConfig

    def __len__(self) -> int:
        return len(self.lengths)

    def block(self, start: int, stop: int) -> Tensor:
        """(k, L) tokens of texts [start, stop)."""
        return self.take(range(start, min(stop, len(self))))

    def take(self, positions: Sequence[int] | Int64s) -> Tensor:
        """(k, L) tokens of the texts at some positions."""
        return tokens((self.item(int(i)) for i in positions), self.tokenize, self.config)


def passage_texts(corpus: Corpus, tokenize: TokenizeTexts, config: PassageConfig) -> TextInputs:
    """The passages of a corpus, as the passage tower reads them."""
    return TextInputs(corpus.__getitem__, corpus.lengths, tokenize, config)


def question_texts(questions: QuestionRows, tokenize: TokenizeTexts, config: QuestionConfig) -> TextInputs:
    """The questions of some rows, as the question tower reads them."""
    return TextInputs(questions.question, questions.lengths, tokenize, config)
