"""Dataclasses of the models of each task: the towers, and the tokenizer or image size to prepare their inputs with."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dyad.data.image_text.transforms import ImageSpec
from dyad.train.towers.libraries.calibration import Calibration
from dyad.train.towers.tower import TwoTower


@dataclass(frozen=True)
class TwoTowerModel:
    """A model of two towers, which embed the two sides of a pair, and the tokenizer of their texts.

    tokenize: converts n texts to token ids, int64 (n, L), where L counts tokens. If no tower takes texts, tokenize is
    None, unless y_tower holds vectors of classes: then it is a ClassNumbers, which converts n names of classes to their
    numbers, int64 (n,). calibration: the logit scale and bias with which pretrained weights of both towers were
    trained; None: not known.
    """

    towers: TwoTower
    tokenize: Any
    calibration: Calibration | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class ImageModel(TwoTowerModel):
    """A model whose x_tower takes images: of task=views or labelled; with captions, an ImageTextModel.

    y_tower is x_tower with task=views, and for a single class of task=labelled; for more classes it holds their
    vectors. image: size and normalisation of the images that x_tower takes.
    """

    image: ImageSpec


@dataclass(frozen=True)
class ImageTextModel(ImageModel):
    """A model whose x_tower takes images and y_tower texts.

    open_clip_config: open_clip's model_cfg if both towers come from one open_clip model, else None.
    """

    open_clip_config: dict[str, Any] | None


@dataclass(frozen=True)
class TextPairModel(TwoTowerModel):
    """A model whose x_tower takes questions and y_tower passages, or one tower texts of both sides (task=views).

    With task=labelled y_tower may hold vectors of the classes instead; tokenize still is that of the texts.

    tokenize: a TextTokenizer, (texts, length, pairs=None) → token ids, int64 (n, L), where L counts tokens.
    """


@dataclass(frozen=True)
class LanguageModel(TwoTowerModel):
    """A model whose y_tower scores answers to prompts, (n, 1), and whose x_tower gives 1 for every row.

    tokenize: a PromptTokenizer, (prompts, answers, most tokens of a prompt, most tokens of an answer) → int64 (n, 1 +
    L), where L counts tokens; longer texts are cut. Column 0 is the number of tokens of the prompt; the tokens of
    prompt and answer follow, padded on the right.
    """


@dataclass(frozen=True)
class SequenceModel(TwoTowerModel):
    """A model of task=sequence, whose one tower embeds items, and steps of sequences as contexts.

    image: size and normalisation of items that are images; None for other items. width: width of an item's embedding.
    names: the ids of the items, if the model comes from an export; else (), and the training data have the ids.
    """

    image: ImageSpec | None
    width: int
    names: Sequence[str] = ()
