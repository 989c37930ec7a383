"""What a model is: its towers, and what prepares their inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dyad.data.image_text.transforms import ImageSpec
from dyad.train.towers.libraries.calibration import Calibration
from dyad.train.towers.tower import TwoTower


@dataclass(frozen=True)
class TwoTowerModel:
    """A model of two towers, which embed the two sides of a pair, and the tokenizer of their texts.

    tokenize: converts n texts to token ids, int64 (n, L), where L counts tokens. calibration: what the weights of both
    towers know of the logit of a pair; None: nothing.
    """

    towers: TwoTower
    tokenize: Any
    calibration: Calibration | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class ImageModel(TwoTowerModel):
    """A model whose x_tower takes images. image: size and normalisation of its input. tokenize: None if no texts."""

    image: ImageSpec


@dataclass(frozen=True)
class ImageTextModel(ImageModel):
    """A model whose x_tower takes images and y_tower texts.

    open_clip_config: open_clip's model_cfg if both towers come from one open_clip model, else None.
    """

    open_clip_config: dict[str, Any] | None


@dataclass(frozen=True)
class TextPairModel(TwoTowerModel):
    """A model whose x_tower takes questions and y_tower passages, or one tower that takes texts.

    tokenize: a TextTokenizer; (texts, length, pairs=None) → token ids, int64 (n, L), where L counts tokens.
    """


@dataclass(frozen=True)
class LanguageModel(TwoTowerModel):
    """A model whose y_tower scores an answer to a prompt, (n, 1), and whose x_tower gives 1.

    tokenize: a PromptTokenizer; (prompts, answers, the longest prompt, the longest answer) → int64 (n, 1 + L).
    Lengths and L count tokens. Column 0 is the number of tokens of the prompt; prompt and answer follow, padded on the
    right.
    """


@dataclass(frozen=True)
class SequenceModel(TwoTowerModel):
    """A model whose one tower embeds items, and steps of sequences as contexts.

    image: of items that are images. width: of the embedding of an item. names: the ids of the items, of an export;
    else the log has them.
    """

    image: ImageSpec | None
    width: int
    names: Sequence[str] = ()
