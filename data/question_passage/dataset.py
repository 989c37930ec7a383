"""The training data set of questions and passages, and their texts for evaluation.

A row of the data has a question, positive passages and perhaps lists of negative ones. For each row, training draws one
positive passage (all of them with data.passage.positives=all) and up to data.negatives.per_row hard negatives. The
random numbers of a draw depend only on the seed, the epoch and the id of the row. A positive passage of a row is never
drawn as its hard negative, even if a list of negatives contains it. `Batch.known_positives` has the content keys
(64-bit hashes) of all positive passages of each row.

Shape letters: b rows of a batch; n or k texts; L tokens of the longest text.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dyad.data.base.arrays import evenly_spaced
from dyad.data.base.errors import ConfigError, SampleError
from dyad.data.batch import Batch, Extra, KnownPositives, text_lengths
from dyad.data.config import DataConfig, DrawnPositives, NegativeList, PassageConfig, QuestionConfig
from dyad.data.loading.negatives import LOOKED_AT, first_indices
from dyad.data.loading.replacement import Replacements
from dyad.data.loading.sample_rng import uniforms
from dyad.data.question_passage.corpus import Corpus
from dyad.data.question_passage.negatives import MinedNegatives, draw_negatives, no_negatives_message
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.question_passage.questions import QuestionRows
from dyad.data.shards.content_keys import Int64s


class TokenizeTexts(Protocol):
    """A tokenizer of texts, or of pairs of texts. A call takes n texts and returns int64 (n, L) on the CPU, padded at
    the right with PADDING (−1, data/batch.py).

    length: the largest number of tokens of a text, or of both texts of a pair together; longer ones are cut. L: the
    number of tokens of the longest text or pair, which may be rounded up. pairs: the second text of each pair; None:
    texts are single.
    """

    def __call__(self, texts: list[str], length: int, pairs: list[str] | None = None) -> Tensor: ...


def tokens(texts: Iterable[Any], tokenize: TokenizeTexts, config: PassageConfig | QuestionConfig) -> Tensor:
    """Tokenise n passages or questions. Return int64 (n, L), padded at the right, with L as TokenizeTexts says.

    texts: Passage objects for a PassageConfig, Question objects for a QuestionConfig. config: gives the largest number
    of tokens, and the prefix of texts whose own prefix is None; with title=pair each passage becomes the pair (title,
    text).
    """
    rendered = [text.rendered(config) for text in texts]
    pairs = [second for _, second in rendered if second is not None]
    return tokenize([first for first, _ in rendered], config.length, pairs or None)


@dataclass(frozen=True)
class DrawnRow:
    """The question and the passages that were drawn for one row of a batch.

    i: index of the row in the data set. positive: the positive that was drawn. extra: further passages, each with True
    for a positive, False for a hard negative. positive_keys: content keys (64-bit hashes) of all positive passages of
    the row, drawn or not. prefix: text that begins all passages of the row; None: the configured prefix. relevance:
    weights in (0, 1] of `positive`, then of each passage in `extra` (1 for a hard negative); None: data.relevance is
    not set.
    """

    i: int
    question: Question
    positive: Passage
    extra: list[tuple[Passage, bool]]
    positive_keys: list[int]
    prefix: str | None = None
    relevance: Sequence[float] | None = None


class QuestionPassage:
    """The training data set of questions and passages. A batch depends only on the seed, its positions (epoch, row
    index), the rows and the mined negatives."""

    def __init__(
        self,
        questions: QuestionRows,
        tokenize: Any,
        config: DataConfig,
        seed: int,
        mined: MinedNegatives | None,
    ) -> None:
        """Set up the training data set of questions and passages, and check the configuration. No row is read.

        questions: the rows to train on. tokenize: the tokenizer of both towers (encoders), a TokenizeTexts. seed: the
        seed of the run, on which all random draws depend. mined: mined hard negatives; None: there are none.

        Raises ConfigError when hard negatives are drawn (data.negatives.per_row above 0), data.negatives.lists has
        "mined", and mined negatives neither exist nor will be mined; and when data.negatives.refresh_every is set
        without a corpus.
        """
        negatives = config.negatives
        if negatives.per_row and NegativeList.mined in negatives.lists and not (mined or negatives.refresh_every):
            raise ConfigError("data.negatives.lists has 'mined': set data.negatives.file, or refresh_every.")
        if negatives.refresh_every and questions.corpus is None:
            raise ConfigError("data.negatives.refresh_every: set data.passage.corpus, the passages to search by id.")
        self.questions, self.tokenize, self.config, self.seed, self.mined = questions, tokenize, config, seed, mined
        self._replacements = Replacements(questions.sizes, seed, config.bad_in_a_row_limit)

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        """Return the training batch of the rows at the given positions, each a pair (epoch, row index).

        Bad rows, whose stored bytes are damaged, are replaced by others. Raises DataError, naming the file, when a file
        has changed or cannot be read, and when a row and its replacements, data.bad_in_a_row rows in all, are bad. With
        data.bad_samples=stop no row is replaced: the first bad one raises SampleError.
        """
        drawn, bad = self._replacements.load(positions, self.drawn, self.questions.origin)
        config = self.config
        extra = [(row, *entry) for row, one in enumerate(drawn) for entry in one.extra]
        told = [(row, one.positive) for row, one in enumerate(drawn)] + [(row, one) for row, one, _ in extra]
        x, y = self.inputs(drawn, [(row, replace(passage, prefix=drawn[row].prefix)) for row, passage in told])
        known = [(row, key) for row, one in enumerate(drawn) for key in one.positive_keys]
        may_have_extra = config.negatives.per_row or config.passage.positives is DrawnPositives.all
        return Batch(
            x=x,
            y=y[: len(drawn)],
            sample_ids=torch.tensor([one.i for one in drawn]),
            x_keys=torch.tensor([one.question.key for one in drawn]),
            y_keys=torch.tensor([one.positive.key for one in drawn]),
            extra=self._extra(y[len(drawn) :], extra, _relevance(drawn, 1, None)) if may_have_extra else None,
            known_positives=KnownPositives(*torch.tensor(known, dtype=torch.int64).reshape(-1, 2).unbind(1)),
            bad=bad,
            x_lengths=text_lengths(self.tokenize, x),
            y_lengths=text_lengths(self.tokenize, y[: len(drawn)]),
            relevance=_relevance(drawn, 0, 1),
            teacher=self._scores([one.positive for one in drawn]),
        )

    def _extra(self, y: Tensor, entries: list[tuple[int, Passage, bool]], relevance: Tensor | None) -> Extra:
        """Return k further passages of a batch: hard negatives, and positives beyond the one drawn for each row. k may
        be 0.

        y (k, …): their tower inputs, the last k that `inputs` returned. entries: for each passage, the index of its row
        in the batch, the passage, and whether it is a positive of this row. relevance (k,): weight of each passage as a
        positive, 1 for a hard negative; None: data.relevance is not set.
        """
        return Extra(
            y=y,
            row=torch.tensor([row for row, _, _ in entries], dtype=torch.int64),
            keys=torch.tensor([passage.key for _, passage, _ in entries], dtype=torch.int64),
            positive=torch.tensor([positive for _, _, positive in entries], dtype=torch.bool),
            lengths=text_lengths(self.tokenize, y),
            relevance=relevance,
            teacher=self._scores([passage for _, passage, _ in entries]),
        )

    def _scores(self, passages: Sequence[Passage]) -> Tensor | None:
        """Return the teacher's scores that the data give k passages, float32 (k,); None if data.teacher is not set."""
        if self.config.teacher is None:
            return None
        return torch.tensor([passage.teacher for passage in passages], dtype=torch.float32)

    def inputs(self, drawn: Sequence[DrawnRow], passages: Sequence[tuple[int, Passage]]) -> tuple[Tensor, Tensor]:
        """Return the inputs of both towers: tokens of the b questions, int64 (b, L), and of the n passages, int64 (n,
        L'). passages: each passage with the index of its row in `drawn`."""
        x = tokens([one.question for one in drawn], self.tokenize, self.config.question)
        return x, tokens([passage for _, passage in passages], self.tokenize, self.config.passage)

    def where(self, sample_id: int) -> str:
        """Return the location of a row as text for messages. sample_id: index of the row in the data set."""
        return f"row {sample_id} of data.train"

    def notes(self) -> list[str]:
        """Return a list of lines for the log: one warning if data.negatives.per_row is set, refresh_every is not, and
        none of at most 100 rows, evenly spaced in the data, has a hard negative that can be drawn; else an empty
        list."""
        negatives, looked = self.config.negatives, evenly_spaced(len(self.questions), LOOKED_AT).tolist()
        if not negatives.per_row or negatives.refresh_every:
            return []
        for i in looked:
            with suppress(SampleError):  # bad rows are replaced
                if draw_negatives(self.questions.row(i), i, self.mined, negatives, (0.0,)):
                    return []
        return [f"data.negatives.per_row={negatives.per_row}: {no_negatives_message(len(looked))}"]

    def drawn(self, epoch: int, i: int) -> DrawnRow:
        """Draw the passages of row i of the training data for an epoch: positives and hard negatives.

        They are one positive (the first of the row if data.passage.positives is "first"), up to data.negatives.per_row
        hard negatives, and all other positives of the row if data.passage.positives is "all"; positives of equal
        content are drawn once. The draw uses 1 + data.negatives.per_row random numbers that depend only on the seed,
        the epoch and i. Raises SampleError when the stored bytes of the row, or of a passage that it names, are
        damaged, and DataError when their file has changed since it was indexed.
        """
        row, config = self.questions.row(i), self.config
        draws = uniforms(self.seed, epoch, i, 1 + config.negatives.per_row)
        keys = row.positives.keys
        chosen = 0 if config.passage.positives is DrawnPositives.first else int(draws[0] * len(keys))
        extra: list[tuple[Passage, bool]] = []
        others = first_indices(keys, {keys[chosen]}) if config.passage.positives is DrawnPositives.all else []
        extra += [(row.positives[j], True) for j in others]
        if config.negatives.per_row:
            extra += [(passage, False) for passage in draw_negatives(row, i, self.mined, config.negatives, draws[1:])]
        relevance = row.relevance and [row.relevance[j] for j in (chosen, *others)] + [1.0] * (len(extra) - len(others))
        texts = row.question, row.positives[chosen], extra
        return DrawnRow(i, *texts, list(dict.fromkeys(keys)), row.passage_prefix, relevance)


def _relevance(drawn: Sequence[DrawnRow], start: int, stop: int | None) -> Tensor | None:
    """Return the entries start … stop − 1 (None: to the last) of DrawnRow.relevance of all rows, concatenated to one
    float tensor; None if data.relevance is not set."""
    parts = [one.relevance[start:stop] for one in drawn if one.relevance is not None]
    return torch.tensor([weight for part in parts for weight in part]) if parts else None


# Evaluation -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextInputs:
    """A list of n passages or questions as inputs of a tower (encoder), read and tokenised on access. Can be pickled.

    item(i): returns the Passage or Question at position i. lengths (n,): the length of each text, such as its bytes,
    so that texts can be sorted by length without being read.
    """

    item: Callable[[int], Any]
    lengths: Int64s
    tokenize: TokenizeTexts
    config: PassageConfig | QuestionConfig

    @staticmethod
    def of(texts: Sequence[Any], tokenize: TokenizeTexts, config: PassageConfig | QuestionConfig) -> "TextInputs":
        """Return n passages or questions in memory as inputs of a tower. Their lengths are bytes of title and text."""
        lengths = [len(f"{getattr(text, 'title', '')}{text.text}".encode()) for text in texts]
        return TextInputs(texts.__getitem__, np.array(lengths, np.int64), tokenize, config)

    def __len__(self) -> int:
        return len(self.lengths)

    def block(self, start: int, stop: int) -> Tensor:
        """Return the tokens of the k texts at positions start … stop − 1, int64 (k, L), with PADDING at the right.

        L: the number of tokens of the longest text, which the tokenizer may round up. If `stop` is more than the number
        of texts, the block ends with the last text.
        """
        return self.take(range(start, min(stop, len(self))))

    def take(self, positions: Sequence[int] | Int64s) -> Tensor:
        """Return the tokens of the texts at the k given positions, in their order, int64 (k, L), padded as by
        `block`."""
        return tokens((self.item(int(i)) for i in positions), self.tokenize, self.config)


def passage_texts(corpus: Corpus, tokenize: TokenizeTexts, config: PassageConfig) -> TextInputs:
    """Return all passages of a corpus as inputs of the passage tower (encoder): a list that reads and tokenises
    passages on access. tokenize: the tower's tokenizer. config: gives the prefix, the use of titles and the largest
    number of tokens."""
    return TextInputs(corpus.__getitem__, corpus.lengths, tokenize, config)
