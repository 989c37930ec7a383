"""Zero-shot classification of images with text prompts for each class.

The embedding of a class is the normalised mean of the normalised embeddings of its prompts, as in open_clip and
CLIP_benchmark. The scores and the metrics are those of classification.py; with an approximate index, the classes of an
image are those that the index finds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np
from torch import Tensor

from dyad.data.base.errors import DataError, nearest
from dyad.data.base.progress import print_on_rank_0
from dyad.data.image_text.items import Captions, Images, LabelledSet
from dyad.data.loading.class_batches import class_key
from dyad.eval.encode.encoder import Encoder
from dyad.eval.tasks.classification import Classification, Scored
from dyad.eval.tasks.prompts import ZeroShotTask, class_names


@dataclass(frozen=True)
class ZeroShot(Classification):
    """Evaluator of zero-shot classification on one set of labelled images.

    data: its labels must be names of classes. classes: class name → its prompts. tokenize: prompts → tower inputs,
    int64 (number of prompts, L).
    """

    task: ClassVar[str] = "zeroshot_classification"
    classes: Mapping[str, Sequence[str]]
    tokenize: Callable[[list[str]], Tensor]

    def scored(self, encode: Encoder, target: np.ndarray) -> Scored:
        return Scored(encode("x", self.data.items), self._weights(encode), {}, {}, {})

    def _weights(self, encode: Encoder) -> np.ndarray:
        """Return the embeddings of the C classes, float32 (C, D), scaled to L2 norm 1. D: embedding width.

        That of a class is the mean of the normalised embeddings of its prompts. All processes must call it together.
        """
        texts = [text for prompts in self.classes.values() for text in prompts]
        embeddings = l2_normalised(encode("y", Captions(texts, self.tokenize)))
        stops = np.cumsum([len(prompts) for prompts in self.classes.values()])
        return np.stack([l2_normalised(part.mean(axis=0)) for part in np.split(embeddings, stops[:-1])])


def keep_known_classes(data: LabelledSet, task: ZeroShotTask, where: str) -> LabelledSet:
    """Return the labelled images whose label is a class of `task`, with class names as labels (see `class_names`).

    Images of other classes are left out, with a printed line that counts them. where: the entry of eval.suite, for
    messages. Raises DataError if there are images of other classes and task.skip_others is False, or if no image is
    left.
    """
    own = {class_key(name): name for name in task.classes}
    labels = class_names([own.get(class_key(label), label) for label in data.labels], [*task.classes])
    chosen = np.flatnonzero([label in task.classes for label in labels])
    if len(chosen) == len(labels):
        return replace(data, labels=labels)
    other = next(label for label in labels if label not in task.classes)
    count = (
        f"{len(labels) - len(chosen):,} of {len(labels):,} samples have a label that is no class, first '{other:.80}'"
    )
    if not task.skip_others or not len(chosen):
        hint = 'leave them out with "others": "skip" in the task file' if len(chosen) else "numbers count from 0"
        raise DataError(f'{where}: {count}.{nearest(other, task.classes)} Mend "classes" or "label"; {hint}')
    print_on_rank_0(f"{where}: {count}: left out")
    return LabelledSet(cast(Images, data.items).chosen(chosen), [labels[i] for i in chosen], data.keys[chosen])


def l2_normalised(vectors: np.ndarray) -> np.ndarray:
    """Return vectors (…, D), each divided by its L2 norm; zero vectors stay zero."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
