"""Zero-shot classification of ImageNet, read from a folder that has one folder of images for each class.

Class names and prompts come from open_clip.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dyad.data.base.errors import ConfigError
from dyad.eval.tasks.prompts import distinct_class_names, prompted
from dyad.eval.tasks.wds import IMAGES
from dyad.evaluation.kinds.images import classification, images
from dyad.evaluation.suite_entry import Inputs, SuiteEntry

if TYPE_CHECKING:
    from dyad.data.shards.shards import Shards
    from dyad.eval.encode.encoder import Evaluator

COUNT = 1000
WORDNET_ID = re.compile(r"n\d{8}")


def class_folders(path: Path) -> list[str]:
    """Return the names of the class folders in the folder `path`, in the order of the class indices.

    The names are the WordNet ids of ImageNet, n01440764 …, or the class indices, 0 … 999, as in ImageNet-V2. Raises
    ConfigError if `path` is no folder, or has not exactly 1,000 folders with such names; files and hidden folders do
    not count.
    """
    if not path.is_dir():
        raise ConfigError(f"imagenet:{path} is no folder")
    names = sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    indices = [str(index) for index in range(COUNT)]
    if names == sorted(indices):
        return indices
    others = [name for name in names if not WORDNET_ID.fullmatch(name)]
    if len(names) != COUNT or others:
        first = f", first '{(others or names)[0]:.80}'" if names else ""
        expected = f"the {COUNT:,} of ImageNet, n01440764 …, or of ImageNet-V2, 0 … {COUNT - 1}"
        raise ConfigError(f"imagenet:{path} has {len(names):,} class folders{first}; expected are {expected}")
    return names


def class_prompts() -> dict[str, list[str]]:
    """Return class name → its prompts, in the order of the class indices, for the 1,000 classes of ImageNet.

    The names are open_clip's, the prompts those names in OpenAI's 80 templates. If two classes have one name, their
    keys have the class index behind it, as "missile (657)"; their prompts do not. Imports open_clip.
    """
    from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES

    templates = [template("{c}") for template in OPENAI_IMAGENET_TEMPLATES]
    return prompted(distinct_class_names(IMAGENET_CLASSNAMES), templates, Path("open_clip"))


def _source(entry: SuiteEntry) -> tuple[list[str], str]:
    """Return ([the folder of an entry imagenet:FOLDER], its key for messages): the argument `named` of `images`.

    Raises ConfigError unless the folder has the class folders of ImageNet, see `class_folders`.
    """
    class_folders(entry.path)  # raises ConfigError for any other folder
    return [str(entry.path)], entry.key


def _imagenet(entry: SuiteEntry, shards: Shards, inputs: Inputs) -> Evaluator:
    """Build the zero-shot evaluator of an entry imagenet:FOLDER; the class of an image is the name of its folder.

    The label of an image, a WordNet id or an index, is replaced by its class name of `class_prompts`.
    """
    classes = class_prompts()
    names = dict(zip(class_folders(entry.path), classes, strict=True))
    found = classification(entry, shards, inputs, "class", classes)
    return replace(found, data=replace(found.data, labels=[names.get(label, label) for label in found.data.labels]))


IMAGENET = replace(
    images(_imagenet, "FOLDER (1,000 class folders)", _source, image_key=IMAGES, columns=[]), prefix="imagenet"
)
