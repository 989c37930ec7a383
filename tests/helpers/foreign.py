"""Small random models of other libraries, made by those libraries, with what each of them computes.

As a plugin (plugins=[helpers.foreign], DYAD_HUB=FOLDER) it is a stand-in for open_clip's hub: its published weights are
those that `open_clip_tag` has written there.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import open_clip.factory as factory
import torch
import transformers
from torch import Tensor
from torch.nn.functional import normalize

from dyad.train.towers.libraries.published import location_of
from helpers.towers import MINILM

TAG, SIGMOID_TAG = ("ViT-B-32", "openai"), ("ViT-L-14-CLIPA", "datacomp1b")  # QuickGELU; bilinear, squashed, a bias
SMALL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 64, "layers": 2, "width": 64, "patch_size": 32, "head_width": 32},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}
SIGMOID = {**SMALL, "init_logit_bias": -10, "custom_text": True}
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
VISION = {**SHAPE, "image_size": 32, "patch_size": 8}
library: Any = open_clip  # annotations of these are too wide for the type checker
of_transformers: Any = transformers
Embed = Callable[[Tensor], Tensor]  # pixels, uint8 (n, 3, S, S), or token ids (n, L) → embeddings (n, D)


@dataclass(frozen=True)
class Foreign:
    """A model of another library, and what that library computes with it.

    words: how a run names it. name: how `dyad.load` does. images, texts: functions of the library, from pixels and from
    texts to embeddings. scale, bias: of its logits. image: size, interpolation, resize, mean and std of its images.
    length: tokens of its texts.
    """

    words: list[str]
    name: str
    images: Embed
    texts: Callable[[list[str]], Tensor]
    scale: float
    bias: float | None
    image: tuple[int, str, str, tuple[float, ...], tuple[float, ...]]
    length: int
    more: Mapping[str, Any] = field(default_factory=dict)


def stand_in_hub(folder: Path) -> None:
    """Let open_clip have small models under published names, and find their published weights in `folder`."""
    for (name, _), settings in ((TAG, SMALL), (SIGMOID_TAG, SIGMOID)):
        (folder / f"{name}.json").write_text(json.dumps(settings))
    library.add_model_config(folder)
    for name, tag in (TAG, SIGMOID_TAG):
        if not (folder / f"{tag}.pt").exists():
            torch.manual_seed(0)
            made = library.create_model(name, force_quick_gelu=tag == "openai")
            with torch.no_grad():
                made.logit_scale.fill_(4.6052 if tag == "openai" else 3.5)
                if made.logit_bias is not None:
                    made.logit_bias.fill_(-12.9)
            torch.save(made.state_dict(), folder / f"{tag}.pt")

    def download(published: Mapping[str, Any], **_: Any) -> str:
        tag = next(tag for name, tag in (TAG, SIGMOID_TAG) if open_clip.get_pretrained_cfg(name, tag) == published)
        return str(folder / f"{tag}.pt")

    factory.download_pretrained = download


def of_open_clip(model: Any, name: str, words: list[str], source: str) -> Foreign:
    """Return the Foreign of an open_clip model. name: of its tokenizer. words, source: Foreign's words and name."""
    spec, tokenize = model.visual.preprocess_cfg, library.get_tokenizer(name)
    size = model.visual.image_size
    size = size[0] if isinstance(size, tuple) else size
    mean, std = (torch.tensor(spec[key]).view(3, 1, 1) for key in ("mean", "std"))
    bias = None if model.logit_bias is None else model.logit_bias.item()
    image = (size, spec["interpolation"], spec["resize_mode"], tuple(spec["mean"]), tuple(spec["std"]))
    model.eval()
    return Foreign(
        words,
        source,
        lambda pixels: model.encode_image((pixels / 255 - mean) / std),
        lambda texts: model.encode_text(tokenize(texts)),
        model.logit_scale.item(),
        bias,
        image,
        tokenize([""]).shape[1],
    )


def open_clip_tag(tag: tuple[str, str] = TAG) -> Foreign:
    """Return the model with published weights. tag: (model, weights). Needs `stand_in_hub`."""
    name, weights = tag
    published = open_clip.get_pretrained_cfg(name, weights)
    model = library.create_model(name, weights, force_quick_gelu=bool(published.get("quick_gelu")))
    return of_open_clip(
        model, name, [f"model.name={name}", f"model.pretrained={weights}"], f"open_clip:{name}@{weights}"
    )


def open_clip_file(folder: Path) -> Foreign:
    """Write an open_clip model, its settings and weights, into `folder`, and return it."""
    (folder / "mine.json").write_text(json.dumps({**SMALL, "quick_gelu": True}))
    library.add_model_config(folder / "mine.json")
    torch.manual_seed(1)
    model = library.create_model("mine")
    with torch.no_grad():
        model.logit_scale.fill_(4.0)
    torch.save({"state_dict": {f"module._orig_mod.{k}": v for k, v in model.state_dict().items()}}, folder / "w.pt")
    words = [f"model.name={folder}/mine.json", f"model.pretrained={folder}/w.pt"]
    return of_open_clip(model, "mine", words, f"open_clip:{folder}/mine.json@{folder}/w.pt")


def clip_tokenizer() -> Any:
    """CLIP's tokenizer as transformers has it: one token is padding, end and unknown."""
    bpe = library.SimpleTokenizer()
    names = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocabulary = {names.get(word, word): number for word, number in bpe.encoder.items()}
    merges = [pair for pair in bpe.bpe_ranks]
    return of_transformers.CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=24)


def of_two_towers(folder: Path, kind: str) -> Foreign:
    """Write a CLIP or a SigLIP of transformers into `folder`, and return it. kind: clip or siglip."""
    torch.manual_seed(2)
    if kind == "clip":
        tokenizer = clip_tokenizer()
        text = {**SHAPE, "vocab_size": 49408, "max_position_embeddings": 24, "eos_token_id": 49407, "pad_token_id": 1}
        settings = of_transformers.CLIPConfig(vision_config=VISION, text_config=text, projection_dim=16)
        model = of_transformers.CLIPModel(settings)
        processor = of_transformers.CLIPImageProcessor(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        )
    else:
        tokenizer = of_transformers.AutoTokenizer.from_pretrained(location_of(MINILM), model_max_length=24)
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = ["input_ids"]
        text = {**SHAPE, "vocab_size": len(tokenizer), "max_position_embeddings": 24}
        model = of_transformers.SiglipModel(of_transformers.SiglipConfig(vision_config=VISION, text_config=text))
        processor = of_transformers.SiglipImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.4, 0.5, 0.6])
        with torch.no_grad():
            model.logit_bias.fill_(-12.9)
    with torch.no_grad():
        model.logit_scale.fill_(3.25)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    for part in (model.eval(), tokenizer, processor):
        part.save_pretrained(folder)
    shape = {"padding": "max_length", "truncation": True, "max_length": 24, "return_tensors": "pt"}
    given = processor.to_dict()
    mean, std = (torch.tensor(given[key]).view(3, 1, 1) for key in ("image_mean", "image_std"))

    how = "shortest" if kind == "clip" else "squash"
    by = {2: "bilinear", 3: "bicubic"}[given["resample"]]
    return Foreign(
        ["model=transformers", f"model.name={folder}"],
        f"hf:{folder}",
        lambda pixels: model.get_image_features(pixel_values=(pixels / 255 - mean) / std).pooler_output,
        lambda texts: model.get_text_features(**tokenizer(texts, **shape)).pooler_output,
        3.25,
        None if kind == "clip" else -12.9,
        (32, by, how, tuple(given["image_mean"]), tuple(given["image_std"])),
        24,
    )


if folder := os.environ.get("DYAD_HUB"):
    stand_in_hub(Path(folder))

MADE: dict[str, Callable[[Path], Foreign]] = {
    "open_clip tag": lambda _: open_clip_tag(),
    "open_clip tag with a bias": lambda _: open_clip_tag(SIGMOID_TAG),
    "open_clip file": open_clip_file,
    "CLIP of transformers": partial(of_two_towers, kind="clip"),
    "SigLIP of transformers": partial(of_two_towers, kind="siglip"),
}


@torch.no_grad()
def unit(embeddings: Tensor) -> Tensor:
    """Return the rows scaled to length 1."""
    return normalize(embeddings, dim=-1)
