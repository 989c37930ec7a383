"""Zero-shot classification of pictures with text prompts for each class.

The embedding of a class is the normalised mean of the normalised embeddings of its prompts, as in open_clip and
CLIP_benchmark. The scores and the metrics are those of classification.py; with an approximate index, the classes of a
picture are those that the index finds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from dyad.data.image_text.dataset import Captions
from dyad.eval.encode.encoder import Encoder
from dyad.eval.tasks.classification import Classification, Scored


@dataclass(frozen=True)
class ZeroShot(Classification):
    """Evaluator of zero-shot classification on one set of labelled pictures. classes: class name → its prompts."""

    task: ClassVar[str] = "zeroshot_classification"
    classes: Mapping[str, Sequence[str]]
    tokenize: Callable[[list[str]], Tensor]

    def scored(self, encode: Encoder, target: np.ndarray) -> Scored:
        return Scored(encode("x", self.data.items), self._weights(encode), {}, {}, {})

    def _weights(self, encode: Encoder) -> np.ndarray:
        """Return the embeddings (C, D) of the C classes: the mean embedding of the prompts of each class, scaled to
        length 1. D: embedding width.
        """
        texts = [text for prompts in self.classes.values() for text in prompts]
        embeddings = unit(encode("y", Captions(texts, self.tokenize)))
        stops = np.cumsum([len(prompts) for prompts in self.classes.values()])
        return np.stack([unit(part.mean(axis=0)) for part in np.split(embeddings, stops[:-1])])


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors (…, D), each scaled to length 1; zeros stay zeros."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
