"""Build the catalogue of captions: a table of all captions that training may draw, and how often an epoch draws each
(expected number of times)."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from dyad.data.base.errors import SampleError
from dyad.data.base.progress import tracked
from dyad.data.image_text.dataset import PairMaker, caption_draws
from dyad.data.image_text.sample import ShardSample
from dyad.data.loading.catalogue import FORMAT, Catalogue, Occurrence, catalogue_table
from dyad.data.loading.order import weights_of_rows
from dyad.data.shards.content_keys import content_key
from dyad.data.shards.index_cache import cached_array
from dyad.data.shards.shards import Shards


def caption_catalogue(shards: Shards, maker: PairMaker) -> Catalogue:
    """Return the Catalogue (data/loading/catalogue.py) of all captions that training may draw from `shards`.

    If data.text_key is set, captions of samples with the same value in this json field share a key. maker: gives the
    configuration and the tokenizer. Left out without a message are samples whose bytes are damaged and, of each sample,
    the names in data.captions from the first one whose captions cannot be used. The first call for given data reads all
    samples, shows its progress, and stores the table in a cache file. Raises DataError for a shard that has changed or
    cannot be read, and as `cached_array` does.
    """
    config = maker.config
    weights = weights_of_rows(shards.sizes, shards.weights)

    def occurrences() -> Iterator[Occurrence]:
        for i, weight in enumerate(tracked(weights, "Catalogue of captions", len(weights))):
            with suppress(SampleError):
                for part, (key, share, text) in enumerate(caption_draws(ShardSample.read(shards, i), config)):
                    yield key, content_key(text.encode()), i, part, weight * share

    def read(place: int, part: int) -> str:
        (found,) = islice(caption_draws(ShardSample.read(shards, place), config), part, part + 1)
        return found[2]

    names = config.captions, config.caption_weights, config.caption_per.value, config.text_key
    made_of = [FORMAT, shards.fingerprint, str(shards.weights), *map(str, names)]
    first, *others = [index.path for index in shards.indexes]
    mapped = cached_array([first], "catalogue", others, made_of, lambda: catalogue_table(occurrences()))
    return Catalogue(mapped, read, lambda texts: maker.tokenize([*texts]), maker.tokenize)
