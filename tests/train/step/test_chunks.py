"""Texts are cut into chunks by length, and nothing but the padding notices; the relevance of pairs stays with them."""

import numpy as np
import pytest
import torch
from helpers.reference import reference_loss
from helpers.step import batch, gradients_of, same_bits, towers, train_step, with_extra
from helpers.towers import transformers_folder
from torch import Tensor, nn

from dyad.data.batch import Batch, Extra, Lengths, map_tensors, text_lengths
from dyad.data.loading.batch_parts import assembled
from dyad.train.config import ModelConfig, Task, TextTower, TrainConfig
from dyad.train.losses import build_objective
from dyad.train.step.chunks import in_chunks
from dyad.train.step.step import TrainStep
from dyad.train.towers.build import build_model
from dyad.train.towers.models import TextPairModel

PAIRS = 12


def texts(count: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    return [f"word {i} " + "more " * int(torch.randint(0, 50, (), generator=generator)) for i in range(count)]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> str:
    return transformers_folder(tmp_path_factory.mktemp("model"), "bert")


def step_and_batch(folder: str, chunk_size: int | None, dropout: float = 0.0) -> tuple[TrainStep, Batch]:
    """A step of dpr, and questions and passages with two mined negatives for every third pair."""
    torch.manual_seed(0)
    config = ModelConfig(name=None, embed_dim=8, shared=False)
    config.text.kind, config.text.name = TextTower.transformers, folder
    model = build_model(TrainConfig(task=Task.question_passage, model=config))
    assert isinstance(model, TextPairModel)
    for module in model.towers.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    row = torch.arange(0, PAIRS, 3).repeat_interleave(2)
    x, y = model.tokenize(texts(PAIRS, 1), 64), model.tokenize(texts(PAIRS + len(row), 2), 64)
    ids, keys = torch.arange(PAIRS), torch.arange(PAIRS + len(row))
    extra = Extra(y[PAIRS:], row, keys[PAIRS:], torch.zeros(len(row), dtype=torch.bool))
    batch = Batch(x, y[:PAIRS], ids, ids, keys[:PAIRS], extra)
    extra.lengths, batch.x_lengths = (text_lengths(model.tokenize, side) for side in (extra.y, x))
    batch.y_lengths = text_lengths(model.tokenize, batch.y)
    return train_step(model.towers, PAIRS, chunk_size=chunk_size, objective=build_objective("dpr")), batch


@pytest.mark.parametrize("chunk_size", [1, 3, 5])
def test_chunks_sorted_by_length_give_the_gradient_of_the_whole_batch(model_of: str, chunk_size: int) -> None:
    whole, batch = step_and_batch(model_of, None)
    chunked, _ = step_and_batch(model_of, chunk_size)
    assert chunked(batch, 0)["loss"] == pytest.approx(whole(batch, 0)["loss"], rel=1e-6)
    for one, other in zip(chunked.terms[0].embeddings, whole.terms[0].embeddings, strict=True):
        torch.testing.assert_close(one, other)
    want = gradients_of(whole)
    for name, gradient in gradients_of(chunked).items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-4, atol=1e-6)


def test_the_noise_of_sorted_chunks_is_that_of_the_step(model_of: str) -> None:
    found = []
    for keep_graphs in (1, 4):
        step, batch = step_and_batch(model_of, 3, dropout=0.3)
        step.terms[0]._keep_graphs = keep_graphs
        step(batch, 5)
        found.append(gradients_of(step))
    assert same_bits(*found)


def padded(batch: Batch, count: int) -> int:
    """Tokens that the y tower embeds, with the padding of each chunk to its longest row."""
    return sum(chunk.sizes[1] * int(_of(chunk.arguments[1]["lengths"]).max()) for chunk in in_chunks(batch, count)[0])


def _of(lengths: Lengths | None) -> Lengths:
    assert lengths is not None
    return lengths


def test_longest_first_and_less_padding(model_of: str) -> None:
    _, batch = step_and_batch(model_of, None)
    chunks, (_, y) = in_chunks(batch, 4)
    lengths = np.concatenate([_of(chunk.arguments[1]["lengths"]) for chunk in chunks])
    assert batch.extra is not None
    of_batch = [*_of(batch.y_lengths).tolist(), *_of(batch.extra.lengths).tolist()]
    assert lengths.tolist() == sorted(of_batch, reverse=True)
    assert padded(batch, 4) < 0.75 * padded(batch, 1)
    rows = torch.cat([chunk.inputs[1] for chunk in chunks])
    assert torch.equal(y.joined([rows]), torch.cat([batch.y, batch.extra.y]))
    assert torch.equal(torch.cat(list(y.split(y.joined([rows])))), rows)


def test_one_chunk_and_images_stay_as_they_are(model_of: str) -> None:
    _, batch = step_and_batch(model_of, None)
    [chunk], _ = in_chunks(batch, 1)
    assert chunk.inputs[0].data_ptr() == batch.x.data_ptr()
    assert np.array_equal(_of(chunk.arguments[0]["lengths"]), _of(batch.x_lengths))
    batch.x_lengths = None
    chunks, _ = in_chunks(batch, 4)
    assert torch.equal(torch.cat([chunk.inputs[0] for chunk in chunks]), batch.x)


class Widths(nn.Module):
    """Notes the row counts it is given; embeds by a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rows = nn.Embedding(30522, 8), list[int]()

    def forward(self, tokens: Tensor, lengths: Lengths | None = None) -> Tensor:
        assert lengths is not None and len(lengths) == len(tokens)
        self.rows.append(len(tokens))
        return self.table(tokens).mean(1)


def test_a_chunk_without_rows_has_the_length_of_its_dummy() -> None:
    tokens, ids = torch.ones(2, 5, dtype=torch.int64), torch.arange(2)
    batch = Batch(tokens, tokens, ids, ids, ids)
    batch.x_lengths, batch.y_lengths = np.array([5, 2]), np.array([1, 3])
    tower = Widths()
    chunks, _ = in_chunks(batch, 3)
    for chunk in chunks:
        tower(chunk.inputs[0], chunk.arguments[0]["lengths"])
    assert tower.rows == [1, 1, 1] and chunks[2].sizes == (0, 0)


@pytest.mark.parametrize("chunk_size", [2, None])
def test_the_relevance_of_own_and_further_positives_reaches_the_objective(chunk_size: int | None) -> None:
    """In parts, as a loader process sends a batch, too."""
    whole = with_extra(batch(7), [0, 0, 3, 1, 0, 2, 1])
    assert whole.extra is not None
    whole.relevance, whole.extra.relevance = torch.linspace(0.1, 1.0, 7), torch.linspace(0.9, 0.2, 7)
    whole = assembled(iter([map_tensors(whole, Tensor.numpy)]), 7, pin=False)
    step = train_step(towers(), 7, objective=build_objective("dpr"), chunk_size=chunk_size)
    x, y, more = step.towers.x_tower(whole.x), step.towers.y_tower(whole.y), step.towers.y_tower(whole.extra.y)
    weights = {(i, i): float(weight) for i, weight in enumerate(whole.relevance)}
    of_extra = zip(whole.extra.row.tolist(), whole.extra.relevance.tolist(), whole.extra.positive.tolist(), strict=True)
    weights |= {(row, 7 + k): weight for k, (row, weight, is_positive) in enumerate(of_extra) if is_positive}
    how = {"further": more, "listed": weights, "relevance": weights, "similarity": "dot", "directions": "x"}
    loss = reference_loss(x, y, torch.zeros(()), **how)
    named = dict(step.towers.named_parameters())
    want = dict(zip(named, torch.autograd.grad(loss, [*named.values()]), strict=True))
    assert step(whole, 0)["loss"] == pytest.approx(float(loss.detach()), rel=1e-12)
    for name, gradient in want.items():
        torch.testing.assert_close(gradients_of(step)[name], gradient, rtol=1e-10, atol=1e-12)
