"""Make training batches of images and their captions from shards.

The image of a sample is its member (file) with the first suffix in data.image_key that it has. Its captions are under
the names in data.captions: "txt" is the text member, where data.caption_per says whether a paragraph or a line is one
caption; any other name is a field of the json member, a string or a list of strings. Training draws one caption,
depending only on the seed, the epoch and the sample id; in a stream on the seed and the place in the stream. Evaluation
takes all captions under the first name.

Shape letters: b images of a batch; S side of the tower's input in pixels; L tokens of a row, padding included.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dyad.data.base.arrays import evenly_spaced
from dyad.data.base.errors import ConfigError, SampleError
from dyad.data.batch import BadSample, Batch, Extra, text_lengths
from dyad.data.config import DataConfig, NegativeList
from dyad.data.image_text import transforms
from dyad.data.image_text.negatives import Mined, MinedTexts, draw_texts, wrong_texts
from dyad.data.image_text.noise import stacked
from dyad.data.image_text.sample import ShardSample
from dyad.data.image_text.transforms import ImageSpec
from dyad.data.image_text.wrong_images import Drawn, MinedImages, WrongImages
from dyad.data.loading.class_batches import ClassNumbers
from dyad.data.loading.negatives import LOOKED_AT
from dyad.data.loading.replacement import Replacements, check_any
from dyad.data.loading.sample_rng import uniforms
from dyad.data.shards.content_keys import content_key
from dyad.data.shards.shards import Shards

Tokenize = Callable[[list[str]], Tensor]  # n texts → int64 (n, L)
CAPTION_DRAWS = 2  # uniforms: which name in data.captions, which caption under it
WHERE = {  # key data.negatives.* that says how many negatives are drawn → help on where the negatives come from
    "per_row": "data.negatives.fields or .file says where they are; python -m eval.mine finds some; per_row=0: none",
    "pictures": "data.negatives.picture_fields or .picture_file says where they are; python -m eval.mine mine=pictures "
    "finds some; pictures=0: none",
}


def image_spec(spec: ImageSpec, config: DataConfig) -> ImageSpec:
    """Return `spec`, the preprocessing of an image tower (encoder), with the resize mode data.resize. If that key is
    None, `spec` is returned unchanged."""
    return spec if config.resize is None else replace(spec, resize=config.resize.value)


class TrainingPair(NamedTuple):
    """An image and one caption of a sample, or its class for task=labelled.

    x, uint8 (3, S, S): the image, resized and cropped to the input side S of the tower; its other augmentation
    (noise.py) is still to be done. text: the caption or class. draws, float64 (DRAWS of transforms.py,): random numbers
    in [0, 1) for the augmentation of the image. x_key: content key (64-bit hash) of the encoded image. y_key: key of
    `text`, as `text_key` returns it. relevance: weight in (0, 1]; None: data.relevance is not set, or the pair is of an
    image and its class. negatives: texts that do not match the image. wrong: images that do not match the caption, each
    as ((image like x, its draws), content key).
    """

    x: Tensor
    text: str
    sample_id: int
    x_key: int
    y_key: int
    draws: np.ndarray
    relevance: float | None
    negatives: tuple[str, ...]
    wrong: Drawn


class PairMaker:
    """Makes training pairs (image and caption) from samples, and batches from training pairs."""

    def __init__(
        self,
        spec: ImageSpec,
        tokenize: Tokenize,
        config: DataConfig,
        seed: int,
        mined: MinedTexts | None = None,
        mined_images: MinedImages | None = None,
    ) -> None:
        """Set up the making of pairs. spec: preprocessing of the image tower (encoder); data.resize replaces its resize
        mode. tokenize: the tokenizer of the text tower. seed: the seed of the run, on which all random draws depend.
        mined, mined_images: files of mined hard negatives, texts and images; None: there are none.

        Raises ConfigError when data.negatives.lists has "mined" and a kind of negatives that is to be drawn (texts,
        images) has no file. This is no error if the list has other entries too and the other kind has a file.
        """
        negatives, files = config.negatives, {MinedTexts.key: mined, MinedImages.key: mined_images}
        counts = {MinedTexts.key: negatives.per_row, MinedImages.key: negatives.pictures}
        without = [key for key, count in counts.items() if count and files[key] is None]
        only_mined = {*negatives.lists} == {NegativeList.mined} or not any(files.values())
        if without and NegativeList.mined in negatives.lists and only_mined:
            raise ConfigError(f"data.negatives.lists has 'mined': set {without[0]}.")
        self.spec, self.tokenize, self.config, self.seed = image_spec(spec, config), tokenize, config, seed
        self.mined, self.wrong = mined, WrongImages(self.spec, config, mined_images)
        weights = config.caption_weights or [1.0] * len(config.captions)
        self._thresholds = np.array(list(accumulate(weights))) / sum(weights)

    @property
    def mined_files(self) -> list[Mined]:
        """The opened files of mined negatives, texts and images, from which pairs get hard negatives."""
        return [mined for mined in (self.mined, self.wrong.mined) if mined is not None]

    def pair(self, sample: ShardSample, sample_id: int, *, epoch: int, position: int) -> TrainingPair:
        """Return a training pair (image and one caption) of the sample. sample_id: stored in the pair. epoch, position:
        two numbers that together with the run's seed determine all random parts (caption, augmentation, negatives).

        Raises SampleError, naming shard and key, for a sample that cannot be used, and DataError when a drawn mined
        image is in no sample of data.train.
        """
        config, count = self.config, CAPTION_DRAWS + transforms.DRAWS
        texts_end = count + config.negatives.per_row
        draws = uniforms(self.seed, epoch, position, texts_end + self.wrong.draws)
        number = int(np.searchsorted(self._thresholds, draws[0], side="right"))
        captions = self.texts(sample, config.captions[min(number, len(config.captions) - 1)])
        text = captions[int(draws[1] * len(captions))]
        y_key = text_key(sample, text, config)
        of_image, decoded = draws[CAPTION_DRAWS:count], sample.decoded(config.image_key, config.max_image_pixels)
        x = transforms.crop_and_resize(decoded, self.spec, config.augment, of_image)
        x_key = content_key(sample.image(config.image_key))
        negatives = self.negatives(sample, x_key, draws[count:texts_end]) if config.negatives.per_row else ()
        wrong = self.wrong.drawn(sample, text, x_key, draws[texts_end:])
        return TrainingPair(x, text, sample_id, x_key, y_key, of_image, self.relevance(sample), negatives, wrong)

    def negatives(self, sample: ShardSample, x_key: int, draws: np.ndarray) -> tuple[str, ...]:
        """Draw texts that do not match the image of a sample (hard negatives), at most one for each number in `draws`.

        x_key: content key of the image. draws: random numbers in [0, 1). No caption of the sample is drawn, and no text
        twice. The result is () if there are no candidates. Raises SampleError if the sample's captions, or the hard
        negatives in its json fields, cannot be used.
        """
        right = [text for name in self.config.captions for text in self.texts(sample, name)]
        return draw_texts(wrong_texts(sample, x_key, self.config, self.mined), right, draws)

    def has_negative_images(self, sample: ShardSample) -> bool:
        """Whether training may draw hard negative images for a sample. True if there are some for one of its captions,
        or if the file of mined images has a line for one of its captions (even an empty one).

        Raises SampleError if the sample's image is missing, a caption cannot be used, or the first negative image found
        cannot be decoded; DataError if this is a mined image that no sample of data.train has.
        """
        x_key = content_key(sample.image(self.config.image_key))
        texts = (text for name in self.config.captions for text in self.texts(sample, name))
        return self.wrong.any_for(sample, texts, x_key)

    def has_negative_texts(self, sample: ShardSample) -> bool:
        """Whether training may draw hard negative texts for a sample. True if there are some for its image, or if the
        file of mined texts has a line for this image (even an empty one). Raises SampleError if its image is missing,
        or its captions or negatives cannot be used."""
        x_key = content_key(sample.image(self.config.image_key))
        return bool((self.mined and x_key in self.mined) or self.negatives(sample, x_key, np.zeros(1)))

    def batch(self, pairs: Sequence[TrainingPair], bad: tuple[BadSample, ...] = ()) -> Batch:
        """Return the batch of b ≥ 1 training pairs. x: the images, uint8 (b, 3, S, S); x_noise: their noise, still to
        be added. y: the tokens of the captions, int64 (b, L).

        Batch.extra has the pairs' hard negative texts; it is None if data.negatives.per_row is 0. Batch.extra_x has
        their hard negative images; None if data.negatives.pictures is 0. bad: the value of Batch.bad.
        """
        images, texts, *numbers, draws, relevance, negatives, wrong = zip(*pairs, strict=True)
        ids, x_keys, y_keys = map(torch.tensor, numbers)
        x, x_noise = stacked(zip(images, draws, strict=True), self.config.augment)
        more = [(row, text) for row, drawn in enumerate(negatives) for text in drawn]
        y, y_more = self.tokenize([*texts, *(text for _, text in more)]).split([len(texts), len(more)])
        lengths = text_lengths(self.tokenize, y)
        weights = None if relevance[0] is None else torch.tensor(relevance)
        return Batch(
            *(x, y, ids, x_keys, y_keys),
            extra=self._extra(y_more, more) if self.config.negatives.per_row else None,
            bad=bad,
            y_lengths=lengths,
            x_noise=x_noise,
            relevance=weights,
            extra_x=self.wrong.extra(x, x_noise, wrong) if self.config.negatives.pictures else None,
        )

    def _extra(self, y: Tensor, negatives: Sequence[tuple[int, str]]) -> Extra:
        """Return k hard negative texts as further items of a batch. y (k, L): their tokens. negatives: the row of the
        batch and the text of each."""
        return Extra(
            y=y,
            row=torch.tensor([row for row, _ in negatives], dtype=torch.int64),
            keys=torch.tensor([content_key(text.encode()) for _, text in negatives], dtype=torch.int64),
            positive=torch.zeros(len(negatives), dtype=torch.bool),
            lengths=text_lengths(self.tokenize, y),
        )

    def check(self, sample: ShardSample) -> None:
        """Raise SampleError when a sample cannot be used for training. This is so when its image is missing or cannot
        be decoded, when the captions under any of the names in data.captions are missing or unusable, when the json
        field named by data.relevance holds no number in (0, 1], or when the json field named by data.text_key is
        missing or no valid Unicode. Hard negatives are not checked."""
        self.relevance(sample)
        sample.decoded(self.config.image_key, self.config.max_image_pixels)
        for name in self.config.captions:
            text_key(sample, self.texts(sample, name)[0], self.config)

    def relevance(self, sample: ShardSample) -> float | None:
        """Return the weight in (0, 1] of a sample as a positive pair; None if data.relevance is not set.

        It is read from the json field that data.relevance names. Raises SampleError if there is no such number.
        """
        return sample.relevance(self.config.relevance)

    def texts(self, sample: ShardSample, name: str) -> list[str]:
        """Return the captions of a sample under `name`, an entry of data.captions; at least one. Raises SampleError if
        there is none, or one that cannot be used."""
        return sample.captions(name, self.config.caption_per)


def maker_with_mined(
    spec: ImageSpec, tokenize: Tokenize, config: DataConfig, seed: int, shards: Shards | None = None
) -> PairMaker:
    """Return a PairMaker with the mined negatives of data.negatives.file and data.negatives.picture_file.

    shards: the training data, which hold the mined images; None: the data are streamed, and data.negatives.picture_file
    is not read. The first call for given data reads the files, and for mined images all samples in `shards`, and stores
    tables in cache files. Raises ConfigError for a missing file and in the cases of PairMaker, DataError for a damaged
    file.
    """
    texts, images = config.negatives.file, config.negatives.picture_file
    mined = MinedTexts(texts) if texts else None
    return PairMaker(
        *(spec, tokenize, config, seed, mined),
        mined_images=MinedImages(images, shards, config) if images and shards else None,
    )


class LabelMaker(PairMaker):
    """Makes pairs of an image and its class in place of a caption; data.captions has no effect.

    `ShardSample.label` reads the class from the member or json field that data.label names. tokenize: converts class
    names to class numbers, so that y of a batch is int64 (b,). Methods raise SampleError for a sample without a class,
    or of a class that `tokenize` refuses.
    """

    tokenize: ClassNumbers

    def relevance(self, sample: ShardSample) -> None:
        return None  # pairs with a class have no relevance

    def texts(self, sample: ShardSample, name: str) -> list[str]:
        label = sample.label(self.config.label)
        self.tokenize([label], f"{sample.where}: its class ")
        return [label]


class ImageText:
    """The training data set of images and captions, or of images and classes if its maker is a LabelMaker.

    A batch depends only on the seed, its positions (epoch, sample id), the shards and the mined negatives.
    """

    def __init__(self, shards: Shards, maker: PairMaker, kinds: np.ndarray | None = None) -> None:
        """Set up the data set, and check its first samples until one is usable: at most data.bad_in_a_row, at least
        one.

        maker: makes pairs from samples and batches from pairs. kinds: as in Replacements. Raises SampleError when all
        checked samples are unusable, so that a wrong key or field in the configuration is reported before any loader
        process starts. Raises ConfigError when hard negatives are to be drawn and none of at most 100 samples, evenly
        spaced in the data, has any.
        """
        self.shards, self._maker, limit = shards, maker, maker.config.bad_in_a_row_limit
        self._replacements = Replacements(shards.sizes, maker.seed, limit, kinds)
        check_any(range(min(len(shards), max(limit, 1))), lambda i: maker.check(ShardSample.read(shards, i)))
        for name, has_any in (("per_row", maker.has_negative_texts), ("pictures", maker.has_negative_images)):
            if getattr(maker.config.negatives, name):
                self._check_negatives(name, has_any)

    def _check_negatives(self, name: str, has_any: Callable[[ShardSample], bool]) -> None:
        """Raise ConfigError if none of at most 100 samples, evenly spaced in the data, has hard negatives.

        name: the key of data.negatives that says how many are drawn for a row. has_any: whether a sample has some.
        """
        looked = evenly_spaced(len(self.shards), LOOKED_AT).tolist()
        for i in looked:
            with suppress(SampleError):  # bad samples are replaced
                if has_any(ShardSample.read(self.shards, i)):
                    return
        problem = f"none of {len(looked):,} samples, evenly spaced in data.train, has negatives"
        raise ConfigError(f"data.negatives.{name}: {problem}. {WHERE[name]}")

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        """Return the training batch of the samples at the given positions, each a pair (epoch, sample id).

        Bad (unusable) samples are replaced by others. Raises DataError, naming the shard, when a shard cannot be read,
        and when a sample and its replacements, data.bad_in_a_row samples in all, are bad. With data.bad_samples=stop
        no sample is replaced: the first bad one raises SampleError.
        """

        def pair(epoch: int, sample_id: int) -> TrainingPair:
            sample = ShardSample.read(self.shards, sample_id)
            return self._maker.pair(sample, sample_id, epoch=epoch, position=sample_id)

        return self._maker.batch(*self._replacements.load(positions, pair, self.shards.origin))

    def where(self, sample_id: int) -> str:
        """Return the location of a sample as text for messages: its row and its shard or table."""
        index, row = self.shards.locate(sample_id)
        return f"sample {row} of {index.path}"


def text_key(sample: ShardSample, text: str, config: DataConfig) -> int:
    """Return the content key (64-bit hash) of the caption `text`. If data.text_key is set, and the sample's json field
    of this name is not null, return instead the hash of this field, so that captions with the same value there share a
    key. Raises SampleError when there is no such field, or when it is no valid Unicode."""
    hint = " data.text_key=null takes the text itself."
    meaning = None if config.text_key is None else sample.named(config.text_key, hint)
    return content_key((text if meaning is None else meaning).encode())


def caption_draws(sample: ShardSample, config: DataConfig) -> Iterator[tuple[int, float, str]]:
    """Yield (key, probability, text) for each caption that training may draw from a sample.

    key: the result of `text_key` for the caption. probability: that this caption is drawn when the sample is used.
    Names in data.captions of weight 0 are skipped. Raises SampleError at the first name under which the captions cannot
    be used; the captions under earlier names have been yielded by then.
    """
    weights = config.caption_weights or [1.0] * len(config.captions)
    for name, weight in zip(config.captions, weights, strict=True):
        texts = sample.captions(name, config.caption_per) if weight else []
        for text in texts:
            yield text_key(sample, text, config), weight / sum(weights) / len(texts), text
