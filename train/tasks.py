"""What a task is made of: one row of TASKS. The only place where x and y have names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data.image_text import ImageText
from data.order import Order
from data.shards import open_shards
from data.sources import parse_sources
from eval.suite import build_evaluators

if TYPE_CHECKING:
    from eval.retrieval import Evaluator
    from train.config import TrainConfig
    from train.towers import Model


@dataclass(frozen=True)
class Data:
    """The training data of a run: a map-style dataset over (epoch, id), its order, and what identifies it."""

    dataset: ImageText
    order: Order
    fingerprint: str


@dataclass(frozen=True)
class Task:
    """names of x and y; how the training data and the evaluators are built."""

    names: tuple[str, str]
    data: Callable[[TrainConfig, Model], Data]
    evaluators: Callable[[TrainConfig, Model], Sequence[Evaluator]]


def _image_text_data(config: TrainConfig, model: Model) -> Data:
    shards = open_shards(parse_sources(config.data.train))
    order = Order(
        shards.sizes,
        shards.weights,
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        shuffle=config.data.shuffle.value,
    )
    dataset = ImageText(shards, model.image, model.tokenize, config.data, config.seed)
    return Data(dataset, order, shards.fingerprint)


def _image_text_evaluators(config: TrainConfig, model: Model) -> Sequence[Evaluator]:
    return build_evaluators(
        config.eval.suite,
        config.data.val,
        image_spec=model.image,
        tokenize=model.tokenize,
        data_config=config.data,
        eval_config=config.eval,
    )


TASKS = {"image_text": Task(("image", "text"), _image_text_data, _image_text_evaluators)}
