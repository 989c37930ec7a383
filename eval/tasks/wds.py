"""Data sets in the folder layout of CLIP_benchmark. Does not import torch.

test/nshards.txt, test/0.tar …            the shards; or 0.tar … in the folder itself
classnames.txt,                           for classification: the .cls file of a sample holds the index of its class,
zeroshot_classification_templates.txt     counted from 0 in the order of classnames.txt
dataset_type.txt with "retrieval"         for retrieval: the .txt file of a sample has one caption per line
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.shards.text_files import open_text
from dyad.eval.tasks.prompts import distinct_class_names, prompted

IMAGES = "webp;png;jpg;jpeg"
LARGEST = 4 << 20  # bytes of a file of names


@dataclass(frozen=True)
class WdsFolder:
    """A data set in the folder layout of CLIP_benchmark.

    shards: paths of the tar files. classes: class name → its prompts, in the order of classnames.txt; empty for
    retrieval.
    """

    path: Path
    shards: Sequence[str]
    classes: Mapping[str, Sequence[str]]

    def class_names(self, labels: Sequence[str]) -> list[str]:
        """Return the class name of each label. labels: class indices from 0, as text.

        Raises DataError for a label that is no index of a class.
        """
        names = list(self.classes)
        for label in labels:
            if not re.fullmatch("[0-9]{1,9}", label) or int(label) >= len(names):
                raise DataError(f"wds:{self.path}: label '{label:.80}', but classnames.txt has {len(names)} classes")
        return [names[int(label)] for label in labels]


def read_wds(path: Path) -> WdsFolder:
    """Read the shard paths, class names and prompt templates of the CLIP_benchmark data set in the folder `path`.

    Raises ConfigError or DataError for a missing or wrong file. The shards are not opened.
    """
    if not path.is_dir():
        raise ConfigError(f"wds:{path} is no folder")
    kind = (_lines(path / "dataset_type.txt", needed=False) or ["classification"])[0].lower()
    if kind not in ("classification", "retrieval"):
        raise ConfigError(f"wds:{path}: dataset_type.txt says '{kind}'; read here are classification and retrieval")
    return WdsFolder(path, _shards(path), {} if kind == "retrieval" else _classes(path))


def _shards(path: Path) -> list[str]:
    """Return the paths of the tar files of a CLIP_benchmark folder, in numerical order.

    If test/nshards.txt has a number n, they are test/0.tar … test/(n − 1).tar; whether these files exist is not
    checked. Else they are 0.tar … in the folder itself; raises ConfigError if it has none.
    """
    count = _lines(path / "test" / "nshards.txt", needed=False)
    if count and re.fullmatch("[0-9]{1,6}", count[0]):
        return [str(path / "test" / f"{n}.tar") for n in range(int(count[0]))]
    numbered = sorted((p for p in path.glob("*.tar") if p.stem.isdecimal()), key=lambda p: int(p.stem))
    if not numbered:
        raise ConfigError(f"wds:{path} needs test/nshards.txt with test/0.tar …, or 0.tar … in the folder itself")
    return [str(p) for p in numbered]


def _classes(path: Path) -> dict[str, list[str]]:
    """Return class name → its prompts, of a CLIP_benchmark folder. Raises the errors of `read_wds`."""
    names = distinct_class_names(_lines(path / "classnames.txt"))  # ImageNet has two cranes
    templates = path / "zeroshot_classification_templates.txt"
    return prompted(names, _lines(templates), templates)


def _lines(path: Path, needed: bool = True) -> list[str]:
    """Return the lines of a text file, stripped and without blank lines.

    needed: whether a missing file raises ConfigError; if not, [] is returned. Raises ConfigError or DataError for a
    file that cannot be read.
    """
    if not path.is_file():
        if needed:
            raise ConfigError(f"{path} is missing")
        return []
    try:
        with open_text(str(path)) as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        return [line.strip() for line in str(content, "utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
