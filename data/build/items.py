"""Count the items on one side of training data: the expected number of times that an epoch draws each as a positive.

An item is a question, a passage, an image or a caption. Items of equal content key, in any rows, are one item.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np

from dyad.data.base.errors import ConfigError, DataError, SampleError
from dyad.data.base.progress import tracked
from dyad.data.cli.inputs import InputKind, kind_of, require_images, shards_of
from dyad.data.cli.options import Side, WeightsOptions, question_config
from dyad.data.config import DataConfig
from dyad.data.loading.order import weights_of_rows
from dyad.data.question_passage.questions import QuestionRows, open_questions
from dyad.data.shards.content_keys import Int64s, content_key
from dyad.data.shards.manifest import Manifest, file_entries
from dyad.data.shards.shards import open_shards

Draws = Iterable[tuple[int, float]]  # (content key, probability that it is drawn when the row is) of a row's items


@dataclass(frozen=True)
class ItemCounts:
    """The n items of one side of training data.

    keys_n (n,) int64: content keys, ascending. counts_n (n,) float64: expected number of times that an epoch draws each
    item as a positive. rows_n (n,) int64: index of a row that has the item as a positive; −1 if no row has.
    """

    keys_n: Int64s
    counts_n: np.ndarray
    rows_n: Int64s


def open_items(arguments: Sequence[str], options: WeightsOptions) -> "ItemRows":
    """Open the training data that the arguments name, in the syntax of data.train, as rows of items to count.

    Raises ConfigError for data that cannot be counted, such as passages alone, and DataError for damaged data.
    """
    kind = kind_of(arguments, options)
    if kind is InputKind.passages:
        raise ConfigError(f"SOURCE {arguments[0]} has passages alone: give the file of their questions, and corpus=")
    return QuestionItems(arguments, options) if kind is InputKind.questions else ImageItems(arguments, options)


def count_items(rows: "ItemRows", with_others: bool) -> ItemCounts:
    """Count the items of all rows, in one pass that shows its progress.

    with_others: whether the items of rows.others() are included, with the count 0 if they are never a positive. Takes
    at least 24 bytes of memory for each positive of each row and for each item of rows.others(). The result may have no
    item. Raises DataError if `rows` does.
    """
    keys, counts, places = array("q"), array("d"), array("q")
    for i, weight in enumerate(tracked(rows.weights, "counting", len(rows.weights))):
        for key, draws in rows.draws(i):
            keys.append(key)
            counts.append(weight * draws)
            places.append(i)
    for others in rows.others() if with_others else ():
        keys.frombytes(np.asarray(others, np.int64).tobytes())
    counts.extend(repeat(0.0, len(keys) - len(counts)))
    places.extend(repeat(-1, len(keys) - len(places)))
    keys_n, first_n, item = np.unique(np.asarray(keys, np.int64), return_index=True, return_inverse=True)
    return ItemCounts(keys_n, np.bincount(item, np.asarray(counts), len(keys_n)), np.asarray(places)[first_n])


def data_config(options: WeightsOptions) -> DataConfig:
    """Return the section `data` of a run that reads training data as `python -m data weights` does with `options`."""
    own = ("template", "caption_per", "captions", "caption_weights", "text_key", "image_key", "max_image_pixels")
    return replace(question_config(options), **{name: getattr(options, name) for name in own})


class QuestionItems:
    """The rows of files of questions, whose items are counted: the questions if options.side is x, else the passages.

    manifest: the files of the data, as a run records them. weights: expected number of times that an epoch has each
    row. bad: empty, because a bad row raises DataError. The constructor raises ConfigError and DataError as
    `open_questions` does.
    """

    def __init__(self, arguments: Sequence[str], options: WeightsOptions) -> None:
        self._rows: QuestionRows = open_questions(arguments, data_config(options), "SOURCE")
        self._side, self._drawn = options.side, options.positives
        corpus, self.bad = self._rows.corpus, list[str]()
        self.manifest: Manifest = {"data.train": self._rows.files}
        if options.corpus and corpus:
            self.manifest["data.passage.corpus"] = file_entries(corpus.rows.shards.indexes)
        self.weights = weights_of_rows(self._rows.sizes, self._rows.weights)

    def draws(self, i: int) -> Draws:
        """Return (content key, probability) of each item that may be drawn as a positive when row i is drawn."""
        if self._side is Side.x:
            return [(self._rows.question(i).key, 1.0)]
        row = self._rows.row(i)
        return [(key, draws) for key, draws in zip(row.positives.keys, row.draws(self._drawn), strict=True) if draws]

    def text(self, i: int, key: int) -> str:
        """Return the text of the item of row i with the content key `key`, to print."""
        row = self._rows.row(i)
        if self._side is Side.x:
            return row.question.text
        passage = row.positives[row.positives.keys.index(key)]
        return f"{passage.title} {passage.text}".strip()

    def others(self) -> Iterator[Sequence[int] | Int64s]:
        """Yield sequences of content keys of items that may be candidates without being drawn, such as negatives."""
        if self._side is Side.x:
            return
        for row in map(self._rows.row, range(len(self._rows))):
            yield from (row.positives.keys, row.negatives.keys, row.hard_negatives.keys)
        yield from (source.corpus.keys for source in self._rows.sources if source.corpus)


class ImageItems:
    """The samples of shards, with the methods of QuestionItems. Items are the images if options.side is x, else the
    captions.

    bad: error messages of the bad samples that `draws` has met, which training would replace; for these `draws` returns
    nothing. It raises DataError when they are more than the default of data.bad_share allows. The constructor raises
    ConfigError as `require_images` does, and errors as `open_shards` does.
    """

    def __init__(self, arguments: Sequence[str], options: WeightsOptions) -> None:
        from dyad.data.image_text.dataset import caption_draws  # loads torch
        from dyad.data.image_text.sample import ShardSample

        require_images(arguments, options, "SOURCE")
        self._shards = open_shards(shards_of(arguments, options, "SOURCE"))
        self._config, self._side = data_config(options), options.side
        self._read: Callable[[int], Any] = lambda i: ShardSample.read(self._shards, i)
        self._captions, self.bad = partial(caption_draws, config=self._config), list[str]()
        self.manifest = {"data.train": file_entries(self._shards.indexes)}
        self.weights = weights_of_rows(self._shards.sizes, self._shards.weights)

    def draws(self, i: int) -> Draws:
        try:
            sample = self._read(i)
            if self._side is Side.x:
                return [(content_key(sample.image(self._config.image_key)), 1.0)]
            return [(key, share) for key, share, _ in self._captions(sample)]
        except SampleError as error:
            self.bad.append(str(error))
            if len(self.bad) > self._config.bad_share * len(self._shards):
                raise DataError(
                    f"{self.bad[0]} {len(self.bad):,} of the first {i + 1:,} samples are bad. captions=[FIELD] says "
                    "where captions are, image_key= where images are"
                ) from None
            return []

    def text(self, i: int, key: int) -> str:
        sample = self._read(i)
        if self._side is Side.x:
            return sample.where
        return next(text for found, _, text in self._captions(sample) if found == key)

    def others(self) -> Iterator[Sequence[int] | Int64s]:
        return iter(())


ItemRows = QuestionItems | ImageItems
