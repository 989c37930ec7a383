"""The catalogue of captions: all that training may draw, by the key of their meaning (data.text_key)."""

from collections.abc import Iterator
from contextlib import suppress

from dyad.data.base.errors import SampleError
from dyad.data.base.progress import tracked
from dyad.data.image_text.dataset import PairMaker, text_key
from dyad.data.image_text.sample import ShardSample
from dyad.data.loading.catalogue import FORMAT, Catalogue, Occurrence, catalogue_table
from dyad.data.shards.content_keys import content_key
from dyad.data.shards.index_cache import cached_array
from dyad.data.shards.shards import Shards


def caption_catalogue(shards: Shards, maker: PairMaker) -> Catalogue:
    """Return the catalogue of all captions of the samples, under the names in data.captions whose weight is not 0.

    Each occurrence counts as a positive. A sample whose captions cannot be used has none, as the loader replaces it.
    The first call for some data reads all samples, and stores the table. Raises DataError for a damaged shard.
    """
    config = maker.config
    weights = config.caption_weights or [1.0] * len(config.captions)
    names = [name for name, weight in zip(config.captions, weights, strict=True) if weight]

    def captions(sample: ShardSample) -> list[str]:
        return [text for name in names for text in maker.texts(sample, name)]

    def occurrences() -> Iterator[Occurrence]:
        for i in tracked(range(len(shards)), "Catalogue of captions", len(shards)):
            with suppress(SampleError):
                sample = ShardSample.read(shards, i)
                for part, text in enumerate(captions(sample)):
                    yield text_key(sample, text, config), content_key(text.encode()), i, part, True

    made_of = [FORMAT, shards.fingerprint, *names, config.caption_per.value, str(config.text_key)]
    first, *others = [index.path for index in shards.indexes]
    mapped = cached_array([first], "catalogue", others, made_of, lambda: catalogue_table(occurrences()))

    def read(place: int, part: int) -> str:
        return captions(ShardSample.read(shards, place))[part]

    return Catalogue(mapped, read, lambda texts: maker.tokenize([*texts]), maker.tokenize)
