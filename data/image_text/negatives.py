"""Hard negatives of pictures: texts that are wrong for a picture, in its json member or mined by `python -m eval.mine`.

The file mined.jsonl has one line per picture: {"query_id": name of its content key, "negatives": [texts, best ranked
first], "scores": [...]}. Pictures of equal content have the same negatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dyad.data.base.errors import DataError
from dyad.data.config import DataConfig, NegativeList
from dyad.data.image_text.sample import MAX_LETTERS, ShardSample
from dyad.data.loading.negatives import distinct, is_text, open_mined, sample
from dyad.data.shards.content_keys import Int64s, content_key, key_of_name
from dyad.data.shards.index_cache import cached_array
from dyad.data.shards.manifest import file_entries
from dyad.data.shards.rows import Rows

FORMAT = "1"
LINE = '{"query_id": content key of a picture, "negatives": [texts]}'


class MinedTexts:
    """The mined texts of each picture, read from their file by the content key of the picture. Can be pickled.

    files: the description of the file for the manifest of a run.
    """

    def __init__(self, path: str) -> None:
        """Open the file `path` of mined texts.

        Raises ConfigError when it is missing, and DataError, naming the line, when a line is not of the form
        {"query_id": content key, "negatives": [texts]}, or repeats a picture.
        """
        self._rows = rows = open_mined(path)
        self.fingerprint, self.files = rows.fingerprint, file_entries(rows.shards.indexes)
        self._mapped = cached_array(rows.files, "mined texts", [], [FORMAT, rows.fingerprint], lambda: _by_key(rows))

    def texts(self, x_key: int) -> Sequence[str]:
        """Return the mined texts of a picture, best ranked first, cut to MAX_LETTERS; none if it has no line."""
        line = self._line(x_key)
        return [] if line is None else [text[:MAX_LETTERS] for text in self._rows.fields(line)["negatives"]]

    def __contains__(self, x_key: int) -> bool:
        return self._line(x_key) is not None

    def _line(self, x_key: int) -> int | None:
        keys_n, lines_n = self._mapped.array
        place = int(np.searchsorted(keys_n, x_key))
        return int(lines_n[place]) if place < len(keys_n) and keys_n[place] == x_key else None


def wrong_texts(own: ShardSample, x_key: int, config: DataConfig, mined: MinedTexts | None) -> Sequence[str]:
    """Return the texts that are wrong for a picture, of the first list in data.negatives.lists that has any.

    own: the sample of the picture. x_key: content key of the picture. Raises SampleError for a field of
    data.negatives.fields that is no list of texts.
    """
    lists = {
        NegativeList.hard_negatives: lambda: [
            text for name in config.negatives.fields if own.fields.get(name) for text in own.captions(name)
        ],
        NegativeList.mined: lambda: mined.texts(x_key) if mined else (),
    }
    return next((texts for name in config.negatives.lists if name in lists and (texts := lists[name]())), ())


def draw_texts(texts: Sequence[str], right: Sequence[str], draws: np.ndarray) -> tuple[str, ...]:
    """Draw at most one of `texts` for each random number in `draws`, all in [0, 1); none twice, and none of `right`."""
    keys, excluded = ([content_key(text.encode()) for text in some] for some in (texts, right))
    return tuple(texts[i] for i in sample(distinct(keys, set(excluded)), draws))


def _by_key(rows: Rows) -> Int64s:
    """Return the content keys of the pictures of all n lines, ascending, and their lines, (2, n)."""
    found = {}
    for i in range(len(rows)):
        fields = rows.fields(i)
        key, negatives = key_of_name(fields.get("query_id")), fields.get("negatives")
        if key is None or not isinstance(negatives, list) or not all(map(is_text, negatives)):
            raise DataError(f"{rows.where(i)} is not {LINE}. python -m eval.mine makes one from a run of pictures")
        if found.setdefault(key, i) != i:
            raise DataError(f"{rows.where(i)}: its picture is there already, {rows.where(found[key])}")
    return np.array(sorted(found.items()), np.int64).reshape(-1, 2).T
