"""What the formats of text encoders share: an encoder and its tokenizer as a folder of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import MODEL_MAPPING

from data.config import Title
from data.errors import ConfigError
from train.config import Pooling, Task, TrainConfig
from train.export.library import PROBES, ExportSource
from train.towers.adapters import merged
from train.towers.build import TextPairModel
from train.towers.pooled import Pooled
from train.towers.text import TextTokenizer
from train.towers.tower import Tower

INPUTS = ["input_ids", "attention_mask"]  # no token types: the encoder was trained without them


@dataclass(frozen=True)
class TextSide:
    """One side of a model: questions or passages. length: of the longest in tokens; paired: title and text are two."""

    tower: Tower
    tokenize: Callable[..., Tensor]
    prefix: str
    length: int
    paired: bool = False

    @property
    def pooled(self) -> Pooled:
        return cast(Pooled, self.tower.trunk)

    @property
    def too_long(self) -> str:
        """A text of more tokens than are taken: the probes have eleven words."""
        return " ".join(PROBES * (self.length // 11 + 1))

    @torch.no_grad()
    def embed(self, texts: list[str], pairs: list[str] | None = None) -> Tensor:
        """As the run embeds them."""
        return self.tower.eval()(self.tokenize(texts, self.length, pairs))

    def save(self, folder: Path, length: int) -> None:
        """config.json, model.safetensors with the adapters merged in, and the tokenizer's files."""
        tokenizer: Any = copy.deepcopy(cast(TextTokenizer, self.tokenize).tokenizer)
        tokenizer.model_max_length = length
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = INPUTS
        cast(Any, merged(self.pooled.encoder)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def both_sides(model: TextPairModel, config: TrainConfig) -> tuple[TextSide, TextSide]:
    """Questions and passages."""
    tokenize = cast(TextTokenizer, model.tokenize)
    x_tower, y_tower = cast(Tower, model.towers.x_tower), cast(Tower, model.towers.y_tower)
    question, passage = config.data.question, config.data.passage
    return (
        TextSide(x_tower, tokenize, question.prefix, question.length),
        TextSide(y_tower, tokenize, passage.prefix, passage.length, passage.title is Title.pair),
    )


def sides(source: ExportSource, name: str) -> tuple[TextSide, TextSide]:
    """Questions and passages. ConfigError for another model, or an encoder that cannot be loaded alone."""
    model, config = source.model, source.config
    if not isinstance(model, TextPairModel):
        raise ConfigError(
            f"format={name} is of task={Task.question_passage.value}; this run's is {config.task.value}. "
            "Take format=onnx or open_clip"
        )
    question, passage = both_sides(model, config)
    encoder = cast(Any, question.pooled.encoder)
    if type(encoder) is not MODEL_MAPPING.get(type(encoder.config), None):
        raise ConfigError(
            f"format={name}: {type(encoder).__name__} is a part of a model, which nothing loads alone. Take format=onnx"
        )
    return question, passage


POOLING_LINES: dict[Pooling, str] = {
    Pooling.cls: "states[:, 0]",
    Pooling.mean: "(states * mask).sum(1) / mask.sum(1)",
    Pooling.last: "states[range(len(texts)), inputs.attention_mask.sum(1) - 1]",
}


def inputs_in_words(config: TrainConfig) -> str:
    """What the card says of texts and scores."""
    question, passage = config.data.question, config.data.passage
    titles = {
        Title.join: "title, a blank, text",
        Title.pair: "title and text as a pair",
        Title.drop: "text, without its title",
    }
    return (
        f"A question is `{question.prefix!r}` + its text, at most {question.length} tokens; a passage is "
        f"`{passage.prefix!r}` + {titles[passage.title]}, at most {passage.length} tokens. "
        f"Scores are {config.objective.similarity.value}."
    )
