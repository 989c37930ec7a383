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
    """Return the catalogue of the captions of all samples under the names in data.captions. If data.text_key is set,
    captions of samples with the same value in this json field share a key.

    maker: has the configuration and the tokenizer. Unusable captions of a sample, and its captions under later names,
    are left out. The first call for given data reads all samples and stores the table in a cache file. Raises DataError
    for a damaged shard.
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
