"""What the formats of text encoders share: an encoder and its tokenizer as a folder of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING
from transformers.utils import logging

from data.config import Title
from data.errors import ConfigError
from train.adapters import merged
from train.config import Pooling, Task, TrainConfig
from train.exported import PROBES, Source
from train.pooled import Pooled
from train.text_towers import TextTokenizer
from train.tower import Tower
from train.towers import TextPairModel

INPUTS = ["input_ids", "attention_mask"]  # no token types: the encoder was trained without them
LONG = " ".join(PROBES * 100)  # longer than any text may be


@dataclass(frozen=True)
class Side:
    """One side of a model: questions or passages. length: of the longest in tokens; paired: title and text are two."""

    tower: Tower
    tokenize: TextTokenizer
    prefix: str
    length: int
    paired: bool = False

    @property
    def pooled(self) -> Pooled:
        return cast(Pooled, self.tower.trunk)

    @torch.no_grad()
    def embed(self, texts: list[str], pairs: list[str] | None = None) -> Tensor:
        """As the run embeds them."""
        return self.tower.eval()(self.tokenize(texts, self.length, pairs))

    def save(self, folder: Path, length: int) -> None:
        """config.json, model.safetensors with the adapters merged in, and the tokenizer's files."""
        tokenizer: Any = copy.deepcopy(self.tokenize.tokenizer)
        tokenizer.model_max_length = length
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = INPUTS
        cast(Any, merged(self.pooled.encoder)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def sides(source: Source, name: str) -> tuple[Side, Side]:
    """Questions and passages. ConfigError for another model, or an encoder that cannot be loaded alone."""
    model, config = source.model, source.config
    if not isinstance(model, TextPairModel):
        raise ConfigError(f"format={name} is of task={Task.question_passage.value}; this run's is {config.task.value}")
    tokenize = cast(TextTokenizer, model.tokenize)
    x_tower, y_tower = cast(Tower, model.towers.x_tower), cast(Tower, model.towers.y_tower)
    question, passage = config.data.question, config.data.passage
    x_side = Side(x_tower, tokenize, question.prefix, question.length)
    encoder = cast(Any, x_side.pooled.encoder)
    if type(encoder) is not MODEL_MAPPING.get(type(encoder.config), None):
        raise ConfigError(f"format={name}: {type(encoder).__name__} is a part of a model, which nothing loads alone")
    return x_side, Side(y_tower, tokenize, passage.prefix, passage.length, passage.title is Title.pair)


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


@contextmanager
def without_reports() -> Iterator[None]:
    """transformers' lines about weights that a class leaves out."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


LAST_STATE: dict[Pooling, Callable[[Tensor], Tensor]] = {
    Pooling.cls: lambda states_LH: states_LH[0],
    Pooling.mean: lambda states_LH: states_LH.mean(0),
    Pooling.last: lambda states_LH: states_LH[-1],
}


@torch.no_grad()
def embedded_alone(encoder: nn.Module, tokenizer: Any, side: Side, texts: list[str], pairs: list[str] | None) -> Tensor:
    """Texts one by one, without padding, pooled by hand."""
    rows = []
    for i, text in enumerate(texts):
        inputs = tokenizer(text, pairs and pairs[i], truncation=True, return_tensors="pt")
        rows.append(LAST_STATE[side.pooled.pooling](encoder(**inputs).last_hidden_state[0]))
    return torch.stack(rows)
