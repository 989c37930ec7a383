"""Shared code of the export formats for text encoders: one side of a model (TextSide), and how to find both sides."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import MODEL_MAPPING

from dyad.data.base.errors import ConfigError
from dyad.data.config import Title
from dyad.export.library import PROBES, Call, ExportSource
from dyad.export.main import chosen_format
from dyad.train.config import Pooling, TrainConfig
from dyad.train.towers.adapters import merged
from dyad.train.towers.models import TextPairModel
from dyad.train.towers.text.pooled import Pooled
from dyad.train.towers.text.text_tower import TextTokenizer
from dyad.train.towers.tower import Tower

INPUTS = ["input_ids", "attention_mask"]  # no token types: the encoder was trained without them


@dataclass(frozen=True)
class TextSide:
    """One side of a model that embeds texts: its tower, its tokenizer, and how a text is prepared.

    tokenize: (texts, length, pairs) → token ids, int64 (n, L); length is the most tokens of a row, pairs has the second
    text of each pair, or is None. prefix: text put before every text. length: the most tokens of a text. paired:
    whether a text is passed to the tokenizer as a pair of title and text.
    """

    tower: Tower
    tokenize: Callable[..., Tensor]
    prefix: str
    length: int
    paired: bool = False

    @property
    def pooled(self) -> Pooled:
        """The trunk of this side's text tower: the transformers encoder with its pooling."""
        return cast(Pooled, self.tower.trunk)

    @property
    def pooling(self) -> Pooling:
        """How the states of the tokens become one vector.

        Raises ConfigError for an encoder that pools by itself.
        """
        if self.pooled.pooling is None:
            raise ConfigError("this format has no place for an encoder that pools by itself. Take format=onnx")
        return self.pooled.pooling

    @property
    def too_long(self) -> str:
        """A text that has more tokens than `length`: the sample texts PROBES, repeated."""
        return " ".join(PROBES * (self.length // 11 + 1))

    @torch.no_grad()
    def call(self, texts: list[str], *, unit: bool = False, adds_prefix: bool = False, **hints: Any) -> Call:
        """Embed `texts` by our tower; return a Call, which holds texts and embeddings to compare with the library's.

        texts: without this side's prefix, which is put before each text here; if `paired`, each is its own title, too.
        unit: scale embeddings to L2 norm 1. adds_prefix: the library itself adds the prefix, so the Call holds texts
        without it. hints: further arguments for the function in dyad/export/reload.py that runs the library. Puts the
        tower in eval mode.
        """
        prefixed, pairs = [self.prefix + text for text in texts], texts if self.paired else None
        ours = self.tower.eval()(self.tokenize(prefixed, self.length, pairs))
        return Call(F.normalize(ours, dim=-1) if unit else ours, texts if adds_prefix else prefixed, pairs, hints=hints)

    def save(self, folder: Path, length: int) -> None:
        """Write a text encoder into `folder`: config.json, model.safetensors (adapters merged in) and tokenizer files.

        The projection of the tower is not written. length: the most tokens of a text, stored with the tokenizer; it may
        be more than that of this side.
        """
        tokenizer: Any = copy.deepcopy(cast(TextTokenizer, self.tokenize).tokenizer)
        tokenizer.model_max_length = length
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = INPUTS
        cast(Any, merged(self.pooled.encoder)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def text_sides(model: TextPairModel, config: TrainConfig) -> tuple[TextSide, TextSide]:
    """Return the question side and the passage side of a model of texts.

    The prefixes, the lengths and the use of titles come from `config`. With one encoder, both sides have the same
    tower.
    """
    x_tower, y_tower = cast(Tower, model.towers.x_tower), cast(Tower, model.towers.y_tower)
    question, passage = config.data.question, config.data.passage
    return (
        TextSide(x_tower, model.tokenize, question.prefix, question.length),
        TextSide(y_tower, model.tokenize, passage.prefix, passage.length, passage.title is Title.pair),
    )


def encoder_sides(source: ExportSource, name: str) -> tuple[TextSide, TextSide]:
    """Return the question side and the passage side of a model, for an export that transformers' AutoModel loads.

    name: the export format, for messages. Raises ConfigError for a model that is not of texts alone, and if AutoModel
    does not create the class of the question encoder, such as the encoder half of an encoder-decoder model.
    """
    if not isinstance(source.model, TextPairModel):
        task, takes = source.config.task.value, chosen_format(None, source.config, source.model).name
        raise ConfigError(f"format={name} takes no task={task}. Take format={takes}")
    question, passage = text_sides(source.model, source.config)
    encoder = cast(Any, question.pooled.encoder)
    if (kind := type(encoder)) is not MODEL_MAPPING.get(type(encoder.config), None):
        raise ConfigError(f"format={name}: nothing loads {kind.__name__}, a part of a model, alone. Take format=onnx")
    return question, passage
