"""open_clip's text towers at the length of their batch give what they give at the full context."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.eval import LOCAL
from helpers.towers import ARCHITECTURES, transformers_folder
from open_clip.transformer import TextTransformer
from torch import Tensor, nn

from dyad.data.batch import Lengths, text_lengths
from dyad.data.image_text.items import Captions
from dyad.eval.encode.encoder import Encoder
from dyad.train.config import ModelConfig
from dyad.train.towers.build import build_image_text
from dyad.train.towers.models import ImageTextModel
from dyad.train.towers.text.rows import Grouped
from dyad.train.towers.text.text_tower import cut_to_batch
from dyad.train.towers.tower import Tower

END = 49407
# Different text_cfg of the one architecture; whether its towers are cut
CUT: dict[str, dict[str, Any]] = {
    "causal, end of text": {},
    "causal, its end token": {"pool_type": "eos", "eos_id": END, "proj_bias": True},
    "blocks of other kinds": {"qk_norm": True, "scale_attn": True},
}
WHOLE: dict[str, dict[str, Any]] = {
    "full attention": {"no_causal_mask": True},
    "first": {"pool_type": "first"},
    "last": {"pool_type": "last"},
    "none": {"pool_type": "none"},
    "class token at the end": {"embed_cls": True},
}
TEXTS = [" ".join(["frog"] * (1 + i * i % 23)) for i in range(40)]


def open_clip_model(folder: Path, text: dict[str, Any], **options: Any) -> ImageTextModel:
    architecture = ARCHITECTURES["vit"]
    own = {**architecture["text_cfg"], "context_length": 30, **text}
    (folder / "model.json").write_text(json.dumps({**architecture, "text_cfg": own, "custom_text": True}))
    config = ModelConfig(name=str(folder / "model.json"), **options)
    torch.manual_seed(0)
    return build_image_text(config)


def transformers_model(folder: Path, pooler: str) -> ImageTextModel:
    bert = transformers_folder(folder, "bert")
    text = {"hf_model_name": bert, "hf_tokenizer_name": bert, "hf_pooler_type": pooler, "hf_proj_type": "linear"}
    return open_clip_model(folder, {**text, "hf_model_pretrained": False})


def of_the_library(tower: Tower) -> Tower:
    """A copy whose trunk runs as the library has it."""
    plain = copy.deepcopy(tower)
    kinds = type(plain.trunk).__mro__
    plain.trunk.__class__ = kinds[kinds.index(Grouped) + 1]
    return plain


def results(tower: nn.Module, tokens: Tensor, *lengths: Lengths | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Unit embeddings of texts, and the gradients of all weights for a loss of them."""
    embeddings = nn.functional.normalize(tower(tokens, *lengths), dim=1)
    (embeddings @ embeddings.detach().flip(0).T).tanh().square().mean().backward()
    return embeddings, {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}


def check_cut(model: ImageTextModel) -> None:
    tower = model.towers.y_tower.eval()
    assert isinstance(tower, Tower) and isinstance(tower.trunk, Grouped)
    plain, seen, encode_group = of_the_library(tower), list[int](), tower.trunk.encode_group

    def watched(tokens: Tensor) -> Tensor:
        seen.append(tokens.shape[1])
        return encode_group(tokens)

    tower.trunk.encode_group = watched
    assert tower.state_dict().keys() == plain.state_dict().keys() and tower.trunk.extra_repr() == ""
    tokens = model.tokenize(TEXTS)
    tokens[5] = tokens[5].flip(0)  # an end at another place, or none
    lengths = text_lengths(model.tokenize, tokens)
    assert lengths is not None
    found, gradients = results(tower, tokens, lengths)
    expected, theirs = results(plain, tokens)
    assert len(seen) > 1 and min(seen) < tokens.shape[1], "groups, of which some are cut"
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    assert gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("kind", CUT)
def test_a_causal_tower_is_cut(tmp_path: Path, kind: str) -> None:
    check_cut(open_clip_model(tmp_path, CUT[kind]))


def test_a_causal_tower_that_repeats_its_forward_pass_is_cut(tmp_path: Path) -> None:
    check_cut(open_clip_model(tmp_path, {}, grad_checkpointing=True))


@pytest.mark.parametrize("kind", WHOLE)
def test_other_towers_stay_whole(kind: str) -> None:
    trunk = cut_to_batch(TextTransformer(30, 100, 32, 2, 1, **WHOLE[kind]))
    assert type(trunk) is TextTransformer


def test_a_tokenizer_tells_no_lengths_of_texts_that_stay_whole(tmp_path: Path) -> None:
    model = open_clip_model(tmp_path, WHOLE["first"])
    assert text_lengths(model.tokenize, model.tokenize(TEXTS)) is None


@pytest.mark.parametrize("pooler", ["mean_pooler", "cls_pooler", "cls_last_hidden_state_pooler"])
def test_a_transformers_tower_is_cut_by_its_own_padding(tmp_path: Path, pooler: str) -> None:
    check_cut(transformers_model(tmp_path, pooler))


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_a_text_has_its_embedding_whatever_stands_beside_it(tmp_path: Path, kind: str) -> None:
    model = open_clip_model(tmp_path, {}) if kind == "causal" else transformers_model(tmp_path, "mean_pooler")
    encode = Encoder({"y": model.towers.y_tower}, LOCAL, block=16)
    whole = encode("y", Captions(TEXTS, model.tokenize))
    for texts in (TEXTS[:1], TEXTS[:7], TEXTS[:33]):
        found = encode("y", Captions(texts, model.tokenize))
        np.testing.assert_allclose(found, whole[: len(texts)], rtol=0, atol=1e-6)
    assert np.array_equal(whole[TEXTS.index(TEXTS[39])], whole[39]), "equal texts in different blocks"


def test_half_precision_and_a_chunk_of_one_row(tmp_path: Path) -> None:
    tower = open_clip_model(tmp_path, {}).towers.y_tower.eval()
    assert isinstance(tower, Tower)
    tokens = torch.zeros(1, 30, dtype=torch.int64)  # what stands in for a chunk without rows
    assert tower(tokens).isfinite().all()
    rows = torch.randint(1, 1000, (20, 30))
    rows[:, 7] = END
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(tower(rows), of_the_library(tower)(rows), rtol=0.02, atol=0.02)
