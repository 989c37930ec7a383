"""The model of questions and passages: its tokens, rows that run together, one encoder or two, adapters."""

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_bert
from helpers.dist import in_ways, launch
from helpers.messages import raises
from helpers.towers import cnn, refused, trained
from torch import Tensor, nn
from transformers import AutoModel

from dyad.data.base.errors import ConfigError
from dyad.data.batch import PADDING, Batch
from dyad.train.cli.compose import compose_config
from dyad.train.config import ImageTower, ModelConfig, Pooling, Task, TextTower, TextTowerConfig, TrainConfig
from dyad.train.losses import build_objective
from dyad.train.run_folder.named_tensors import named_tensors
from dyad.train.step.step import TrainStep
from dyad.train.towers.adapters import merged
from dyad.train.towers.build import build_model, build_text_pair
from dyad.train.towers.models import TwoTowerModel
from dyad.train.towers.text import rows
from dyad.train.towers.text.pooled import Pooled
from dyad.train.towers.text.rows import group_by_length, token_counts
from dyad.train.towers.tower import Tower
from dyad.training_data import build_data

TEXTS = ["a", "a red cat", "b " * 9, "c d e " * 6, "x y", "f " * 60, "", "g h i j"] * 6


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bert")
    tiny_bert.write(folder)
    return str(folder)


def config(name: str, text: dict[str, Any] | None = None, **model: Any) -> ModelConfig:
    own = TextTowerConfig(kind=TextTower.transformers, name=name, **(text or {}))
    return ModelConfig(**{"name": None, "embed_dim": None, "text": own, **model})


def build(name: str, text: dict[str, Any] | None = None, **model: Any) -> TwoTowerModel:
    torch.manual_seed(0)
    return build_model(TrainConfig(task=Task.question_passage, model=config(name, text, **model)))


# Tokens ---------------------------------------------------------------------------------------------------------------


def test_tokens_are_as_long_as_the_longest_text_and_no_longer_than_said(bert: str) -> None:
    tokenize = build(bert).tokenize
    assert tokenize(["a"], 30).shape == (1, 8) and tokenize(["a", "b " * 7], 30).shape == (2, 16)
    cut = tokenize(["a", "b " * 50], 30)
    assert (
        cut.shape == (2, 30)
        and cut.dtype == torch.int64
        and (cut[0, 3:] == PADDING).all()
        and (cut[1] != PADDING).all()
    )
    pairs = tokenize(["a", "b"], 12, ["c d", "e " * 50])
    assert pairs[0].tolist() == [
        *tokenize(["a"], 8)[0, :3].tolist(),
        *tokenize(["c d"], 8)[0, 1:4].tolist(),
        *[PADDING] * 6,
    ]
    assert pairs.shape == (2, 12) and (pairs[1] == 3).sum() == 2  # of a pair the longer text is cut


def test_lengths_that_cannot_be_are_refused(bert: str) -> None:
    tokenize = build(bert).tokenize
    with raises(ConfigError, "600 tokens", "data.passage.length"):
        tokenize(["a"], 600)
    with raises(ConfigError, "2 tokens"):
        tokenize(["a"], 2)
    assert build(bert, {"context_length": 20}).tokenize(["b " * 50], 20).shape == (1, 20)
    with raises(ConfigError, "21 tokens"):
        build(bert, {"context_length": 20}).tokenize(["a"], 21)


LATE = {
    "data.question.length=600": "600 tokens",
    "data.passage.length=2": "2 tokens",
    "data.passage.length=3 data.passage.title=pair": "3 tokens",
    "data.negatives.refresh_every=2 data.negatives.per_row=1 data.negatives.lists=[mined] "
    "data.negatives.mining.index=Flatt": "'Flatt'",
}


@pytest.mark.parametrize("words", LATE)
def test_what_would_show_at_the_first_batch_is_refused_before(bert: str, words: str) -> None:
    names = ["model=encoder", f"model.text.name={bert}", "data=question_passage", "data.train=unread"]
    whole = compose_config(["task=question_passage", *names, *words.split()])
    with raises(ConfigError, LATE[words]):
        build_data(whole, build(bert))


def test_the_files_that_a_run_records_are_those_that_keys_name(bert: str) -> None:
    """The passages of a BEIR folder are part of data.train."""
    names = ["task=question_passage", "model=encoder", f"model.text.name={bert}", "data=question_passage"]
    topics = "data.train=data/samples/topics"
    corpus = "data.passage.corpus=data/samples/topics/corpus.jsonl"
    for words, keys in (([topics], {"data.train"}), ([topics, corpus], {"data.train", "data.passage.corpus"})):
        assert (
            build_data(compose_config([*names, *words, "data.passage.length=8"]), build(bert)).manifest.keys() == keys
        )


def test_the_tokenizer_goes_to_other_processes(bert: str) -> None:
    tokenize = build(bert).tokenize
    want = tokenize(TEXTS, 30)
    assert torch.equal(pickle.loads(pickle.dumps(tokenize))(TEXTS, 30), want)
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        assert pool.submit(tokenize, TEXTS, 30).result(timeout=60).tolist() == want.tolist()


# Rows that run together -----------------------------------------------------------------------------------------------


def test_groups_have_few_rows_less_padding_and_all_rows_once() -> None:
    lengths = [8, 16, 8, 32, 16, 8, 24, 8, 8]
    assert group_by_length(lengths, 2) == [[3, 6], [1, 4], [0, 2, 5, 7, 8]]
    assert group_by_length(lengths, 4) == [[3, 6, 1, 4], [0, 2, 5, 7, 8]]
    assert group_by_length([8, 8, 8, 16], 1) == [[3], [0, 1, 2]] and group_by_length([16, 16, 16, 8], 2) == [
        [0, 1, 2, 3]
    ]
    assert group_by_length([16, 8], 9) == [[0, 1]] and group_by_length([], 2) == [[]]


EACH = {(pooling, least): pooling is Pooling.mean or least == 3 for pooling in Pooling for least in (1, 3, 16, 1000)}


@pytest.mark.parametrize(
    ("pooling", "least"),
    [case if often else pytest.param(*case, marks=pytest.mark.soak) for case, often in EACH.items()],
)
def test_embeddings_are_those_of_every_text_alone(
    bert: str, pooling: Pooling, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rows.MIN_GROUP, "cpu", least)
    model = build(bert, {"pooling": pooling}, embed_dim=8)
    tower, tokens = model.towers.y_tower.eval(), model.tokenize(TEXTS, 64)
    with torch.no_grad():
        together, wider = tower(tokens), tower(nn.functional.pad(tokens, (0, 16), value=PADDING))
        alone = torch.cat([tower(model.tokenize([text], 64)) for text in TEXTS])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(wider, alone, rtol=1e-4, atol=1e-5)


def test_lengths_are_exact_where_a_cpu_evaluates(bert: str) -> None:
    tower = build(bert).towers.y_tower
    assert isinstance(tower, Tower) and isinstance(tower.trunk, Pooled)
    seen: list[int] = []
    tower.trunk.encoder.register_forward_pre_hook(
        lambda _, args, options: seen.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    tokens = torch.full((2, 24), PADDING).where(torch.arange(24) >= torch.tensor([[11], [5]]), 7)
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            tower(tokens)
    assert seen == [11, 16]


def test_gradients_do_not_depend_on_the_groups(bert: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for least in (1, 1000):
        monkeypatch.setitem(rows.MIN_GROUP, "cpu", least)
        model = build(bert)
        model.towers.eval()
        model.towers.y_tower(model.tokenize(TEXTS, 64)).square().sum().backward()
        found.append({name: p.grad for name, p in model.towers.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-4)


def test_a_row_without_any_token_is_finite(bert: str) -> None:
    """What stands in for a chunk that has no row."""
    tower = build(bert).towers.y_tower
    tower(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    assert all(p.grad.isfinite().all() for p in tower.parameters() if p.grad is not None)


def test_a_frozen_text_has_the_same_bits_however_it_is_filled_up(bert: str) -> None:
    model = build(bert, {"frozen": True})
    tower = model.towers.y_tower
    assert isinstance(tower, Tower)
    narrow, rows = model.tokenize(TEXTS[:3], 64), model.tokenize(TEXTS, 64)
    first = tower(narrow)
    assert narrow.shape[1] < rows.shape[1] and torch.equal(tower(rows)[:3], first)
    assert tower._frozen_cache is not None and len(tower._frozen_cache._cached) == len(set(TEXTS))
    tower._frozen_cache = type(tower._frozen_cache)(1 << 20, (token_counts, PADDING))
    assert torch.equal(tower(rows)[:3], first)


# One encoder or two ---------------------------------------------------------------------------------------------------


def test_one_encoder_or_two_with_the_same_start(bert: str) -> None:
    shared, own = build(bert, embed_dim=8).towers, build(bert, embed_dim=8, shared=False).towers
    assert shared.x_tower is shared.y_tower and own.x_tower is not own.y_tower
    x, y = dict(own.x_tower.named_parameters()), dict(own.y_tower.named_parameters())
    assert x.keys() == y.keys() and all(torch.equal(x[name], y[name]) and x[name] is not y[name] for name in x)
    stored = AutoModel.from_pretrained(bert).embeddings.word_embeddings.weight
    assert torch.equal(x["trunk.encoder.embeddings.word_embeddings.weight"], stored)
    names = named_tensors({"towers": shared})
    assert len(names) * 2 == len(named_tensors({"towers": own})) and all("x_tower" in name for name in names)


def test_weights_stored_in_less_are_trained_in_float32(bert: str, tmp_path: Path) -> None:
    AutoModel.from_pretrained(bert, dtype=torch.bfloat16).save_pretrained(tmp_path)
    build(bert).tokenize.tokenizer.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    for scratch in (False, True):
        towers = build(str(tmp_path), {"from_scratch": scratch}).towers
        assert {p.dtype for p in towers.parameters()} == {torch.float32}


def test_what_cannot_be_a_pair_of_encoders_is_explained(bert: str) -> None:
    with raises(ConfigError, "model.text.kind=open_clip", "kind=transformers"):
        build_text_pair(ModelConfig())
    with raises(ConfigError, "lora_targets=['no']"):
        build(bert, {"lora_rank": 4, "lora_targets": ["no"]})
    image = cnn()
    assert image.kind is ImageTower.cnn
    refused(ModelConfig(name=None, embed_dim=None, image=image), "model.embed_dim=null")


# Adapters -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shared", [True, False])
def test_adapters_train_and_nothing_else(bert: str, shared: bool, checkpointing: bool) -> None:
    model = build(bert, {"lora_rank": 4}, shared=shared, grad_checkpointing=checkpointing)
    before = {name: p.detach().clone() for name, p in model.towers.named_parameters()}
    assert trained(model.towers) == {name for name in before if "lora_" in name} != set()
    step = text_step(model, chunk_size=3)
    for index in range(2):
        step(text_batch(model), index)
    changed = {name for name, p in model.towers.named_parameters() if not torch.equal(p, before[name])}
    assert changed == trained(model.towers)


def test_adapters_begin_as_nothing_and_merge_into_the_weights(bert: str) -> None:
    plain, adapted = build(bert), build(bert, {"lora_rank": 4, "lora_targets": ["query", "dense"]})
    tokens = plain.tokenize(TEXTS, 64)
    with torch.no_grad():
        want = plain.towers.eval().x_tower(tokens)
        torch.testing.assert_close(adapted.towers.eval().x_tower(tokens), want, rtol=1e-4, atol=1e-5)
        for name, p in adapted.towers.named_parameters():
            if "lora_B" in name:
                p.normal_()
        trunk = adapted.towers.x_tower.get_submodule("trunk")
        assert isinstance(trunk, Pooled)
        learnt = trunk(tokens)
        assert not torch.allclose(learnt, want, atol=1e-2)
        alone = Pooled(merged(trunk.encoder), trunk.pooling, trunk.pad).eval()
        assert not any("lora" in name for name in alone.state_dict())
        torch.testing.assert_close(alone(tokens), learnt, rtol=1e-3, atol=1e-4)
        assert torch.equal(trunk(tokens), learnt)


# The step -------------------------------------------------------------------------------------------------------------


def text_step(model: TwoTowerModel, **options: Any) -> TrainStep:
    from helpers.step import train_step

    return train_step(model.towers, 8, objective=build_objective("dpr"), **options)


def text_batch(model: TwoTowerModel) -> Batch:
    ids = torch.arange(8)
    return Batch(model.tokenize(TEXTS[:8], 16), model.tokenize(TEXTS[8:16][::-1], 64), ids, ids, 100 + ids)


@pytest.mark.parametrize("shared", [True, False])
def test_dropout_is_replayed_in_any_groups(bert: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second pass has the noise of the first: kept graphs or none, the same gradient to the bit."""
    monkeypatch.setitem(rows.MIN_GROUP, "cpu", 1)
    found: list[dict[str, Tensor]] = []
    for keep in (1, 9):
        model = build(bert, shared=shared)
        step = text_step(model, chunk_size=4, keep_graphs=keep)
        step(text_batch(model), 3)
        found.append({name: p.grad.clone() for name, p in model.towers.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and all(torch.equal(found[1][name], g) for name, g in found[0].items())


@in_ways
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_steps_on_texts_equal_one_process(world_size: int, ways: str) -> None:
    launch("dist_text.py", world_size, ways)
