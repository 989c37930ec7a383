"""Build the two towers of a configuration, with the tokenizer of their texts."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from dyad.data.base.errors import ConfigError
from dyad.data.config import ItemKind
from dyad.data.image_text.transforms import ImageSpec
from dyad.data.loading.class_batches import ClassNumbers
from dyad.train.config import Classes, Head, ModelConfig, Task, TextTower, TrainConfig
from dyad.train.towers.batch_norm import set_batch_norms
from dyad.train.towers.heads import Representation, build_head
from dyad.train.towers.image.image_tower import build_image_tower
from dyad.train.towers.libraries.calibration import Calibration, exported
from dyad.train.towers.libraries.open_clip import BuildContext, may_download
from dyad.train.towers.libraries.published import offline_without_hub
from dyad.train.towers.models import (
    ImageModel,
    ImageTextModel,
    LanguageModel,
    SequenceModel,
    TextPairModel,
    TwoTowerModel,
)
from dyad.train.towers.sequence import ContextNetwork, FrameEncoder, SequenceTower
from dyad.train.towers.text.likelihood import One
from dyad.train.towers.text.pooled import Pooled
from dyad.train.towers.text.text_tower import TextTokenizer, build_likelihood, build_text_encoder, build_text_tower
from dyad.train.towers.tower import Tower, TwoTower
from dyad.train.towers.trial import probe, probe_images

TOKENS_REFUSED = "model.text: this tower cannot take its tokenizer's tokens"
# (ModelConfig, load_pretrained), and for task=labelled names of classes, for task=sequence run.inputs → a model
Build = Callable[..., Any]


def build_model(config: TrainConfig, load_pretrained: bool = True) -> TwoTowerModel:
    """Build the model of a configuration: the towers that the keys of model.* describe, for its task and items.

    Returns an object of a subclass of TwoTowerModel (models.py), with the towers on torch's default device and in
    train() mode. Parameters that the embeddings do not depend on are frozen, except with task=language_model.
    load_pretrained=False: build architectures only, with random weights, because the weights come from a checkpoint.
    Random initial weights come from torch's global generator. task=labelled needs config.run.classes; task=sequence
    needs config.run.inputs if its items are ids or frames. Downloads published files that are not in the cache. Sets
    TOKENIZERS_PARALLELISM=false in the environment unless it is set. If downloads are expected (`may_download`) and the
    hub does not answer, makes huggingface_hub use its cache alone in this process. Raises ConfigError for an unknown
    model, weights that do not exist, inputs that a tower cannot take, or towers of different widths.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive the loader's fork
    if may_download(config):
        offline_without_hub()
    found = [value for value in (config.run.classes, config.run.inputs) if value is not None]
    return MODELS[config.task][config.data.items](config.model, load_pretrained, *found)


def build_image_text(config: ModelConfig, load_pretrained: bool = True) -> ImageTextModel:
    """Build the image tower and the text tower of task=image_text.

    load_pretrained=False: build architectures only, with random weights. Raises ConfigError for a model or weights that
    do not exist or do not fit, inputs that a tower cannot take, or towers of different widths.
    """
    context = BuildContext(config, load_pretrained)
    image, spec = build_image_tower(context)
    text, tokenize = build_text_tower(context)
    widths = [probe_images(image, spec), probe(text, tokenize(["a"]), TOKENS_REFUSED)]
    if widths[0] != widths[1]:
        raise ConfigError(
            f"the image tower gives embeddings of width {widths[0]}, the text tower {widths[1]}: set model.embed_dim "
            "to the width of the tower that comes with its own projection, or take both towers from one model"
        )
    towers, model_cfg = _pair(image, text, config), context.open_clip_config()
    return ImageTextModel(towers, tokenize, spec, model_cfg, calibration=context.calibration)


def build_text_pair(config: ModelConfig, load_pretrained: bool = True) -> TextPairModel:
    """Build the towers of task=question_passage, from a transformers encoder.

    model.shared=true builds one tower for both sides; else there are two, whose weights are equal at first.
    load_pretrained=False: build architectures only, with random weights. Raises ConfigError for a model.text.kind other
    than transformers, a model or weights that do not exist or do not fit, or inputs that a tower cannot take.
    """
    generator = torch.get_rng_state()
    tower, tokenize = other, _ = _text_encoder(config, load_pretrained)
    if not config.shared:  # loaded again: a copy would hold in memory weights that are otherwise mapped from files
        torch.set_rng_state(generator)
        other, _ = _text_encoder(config, load_pretrained)
    for encoder in dict.fromkeys((tower, other)):
        _probe_width(encoder, tokenize)
    return TextPairModel(_pair(tower, other, config), tokenize, calibration=_saved_calibration(config, load_pretrained))


def build_image_views(config: ModelConfig, load_pretrained: bool = True) -> ImageModel:
    """Build the model of task=views for images: one image tower for both sides, with the projection head model.head.

    With model.head=none the tower keeps its own projection. Arguments and errors are those of `build_image_text`.
    """
    tower, spec = build_image_tower(BuildContext(config, load_pretrained))
    return ImageModel(_one_tower(tower, config, spec), None, spec)


def build_text_views(config: ModelConfig, load_pretrained: bool = True) -> TextPairModel:
    """Build the model of task=views for texts: one transformers encoder for both sides, with the head model.head.

    With model.head=none the tower keeps its own projection. Arguments and errors are those of `build_text_pair`.
    """
    tower, tokenize = _text_encoder(config, load_pretrained)
    return TextPairModel(_one_tower(tower, config, tokenize), tokenize)


def build_labelled(
    build_views: Build, build_prompted: Build, config: ModelConfig, load_pretrained: bool, classes: Sequence[str]
) -> TwoTowerModel:
    """Build the model of task=labelled: an x tower for samples, and a y tower for classes.

    The y tower holds a learned vector for each class, of length about 1 at first; with model.classes=prompted it is a
    text tower for prompts of the classes. For a single class both sides are one tower, which gives one score (b, 1).
    build_views, build_prompted: functions from (config, load_pretrained) to a model of one tower for the samples, and
    to a model with a text tower for the prompts. classes: names of the classes. load_pretrained and errors are those of
    `build_model`; also raises ConfigError for a single class and a tower whose width is not 1.
    """
    single = len(classes) == 1
    if config.classes is Classes.prompted and not single:
        return build_prompted(config, load_pretrained)
    model = build_views(replace(config, embed_dim=1) if single else config, load_pretrained)
    tower = cast(Tower, model.towers.x_tower)
    width = _probe_width(tower, model.image if isinstance(model, ImageModel) else model.tokenize)
    if single and width != 1:
        problem = f"data.rare: the tower has a projection of its own, of width {width}, and a score is one number"
        raise ConfigError(f"{problem}. Take an image tower of kind cnn, timm or transformers")
    if single:
        return model
    vectors = nn.Embedding(len(classes), width)
    nn.init.normal_(vectors.weight, std=width**-0.5)
    towers = TwoTower(tower, Tower(vectors, nn.Identity())).train()
    return replace(model, towers=towers, tokenize=model.tokenize or ClassNumbers(classes))


def build_sequence(
    item_tower: Callable[[ModelConfig, bool, int], tuple[Tower, Any]],
    config: ModelConfig,
    load_pretrained: bool = True,
    inputs: int = 1,
) -> SequenceModel:
    """Build the model of task=sequence, whose one tower embeds items, and steps of sequences as contexts.

    item_tower: a function from (config, load_pretrained, inputs) to a pair: the tower of an item, and the tokenizer or
    ImageSpec that prepares its inputs (None for ids and frames). inputs: run.inputs, the number of item ids or of
    features of a frame; not used for texts and images. load_pretrained=False: build architectures only, with random
    weights. Raises the errors of `item_tower`; also ConfigError for inputs that the tower of an item cannot take, and
    for a transformer as context network whose width is not a multiple of its heads.
    """
    items, prepared = item_tower(config, load_pretrained, inputs)
    width = config.embed_dim or 0 if prepared is None else _probe_width(items, prepared)
    tower = SequenceTower(items, ContextNetwork(config.context, width))
    spec, tokenize = (prepared, None) if isinstance(prepared, ImageSpec) else (None, prepared)
    return SequenceModel(_pair(tower, tower, config), tokenize, spec, width)


def _ids_tower(config: ModelConfig, load_pretrained: bool, count: int) -> tuple[Tower, None]:
    """Build a tower that gives learned vectors (b, D), of length about 1 at first, for item numbers, int64 (b,).

    count: the number of items. Raises ConfigError if model.embed_dim is null.
    """
    vectors = nn.Embedding(count, _embed_dim(config))
    nn.init.normal_(vectors.weight, std=vectors.embedding_dim**-0.5)
    return Tower(vectors, nn.Identity()), None


def _frames_tower(config: ModelConfig, load_pretrained: bool, features: int) -> tuple[Tower, None]:
    """Build a tower with random weights that embeds frames (b, features) as (b, D), D = model.embed_dim.

    Raises ConfigError if model.embed_dim is null.
    """
    width = _embed_dim(config)
    return Tower(FrameEncoder(features, 4 * width), nn.Linear(4 * width, width)), None


def _embed_dim(config: ModelConfig) -> int:
    """Return model.embed_dim, for items that have no width of their own. Raises ConfigError if it is null."""
    if config.embed_dim is None:
        raise ConfigError("model.embed_dim=null: ids and frames have no width of their own. Set model.embed_dim")
    return config.embed_dim


def build_language_model(config: ModelConfig, load_pretrained: bool = True) -> LanguageModel:
    """Build the model of task=language_model: a y tower that scores answers to prompts, and an x tower that gives 1.

    Arguments and errors are those of `build_likelihood`.
    """
    tower, tokenize = build_likelihood(config, load_pretrained)
    return LanguageModel(_pair(Tower(One(), nn.Identity()), tower, config), tokenize)


# task → data.items → function that builds the model; a task that ignores data.items has the same for all
MODELS: dict[Task, dict[ItemKind, Build]] = {
    Task.image_text: dict.fromkeys(ItemKind, build_image_text),
    Task.question_passage: dict.fromkeys(ItemKind, build_text_pair),
    Task.language_model: dict.fromkeys(ItemKind, build_language_model),
    Task.views: {ItemKind.pictures: build_image_views, ItemKind.texts: build_text_views},
    Task.labelled: {
        ItemKind.pictures: partial(build_labelled, build_image_views, build_image_text),
        ItemKind.texts: partial(build_labelled, build_text_views, build_text_views),
    },
    Task.sequence: {
        ItemKind.ids: partial(build_sequence, _ids_tower),
        ItemKind.frames: partial(build_sequence, _frames_tower),
        ItemKind.texts: partial(
            build_sequence, lambda config, load_pretrained, _: _text_encoder(config, load_pretrained)
        ),
        ItemKind.pictures: partial(build_sequence, lambda *given: build_image_tower(BuildContext(*given[:2]))),
    },
}


def _one_tower(tower: Tower, config: ModelConfig, prepared: ImageSpec | TextTokenizer) -> TwoTower:
    """Return a TwoTower of which both sides are `tower`.

    Unless model.head is none, the head replaces the projection of `tower`, in place. prepared: as for `_probe_width`.
    """
    if config.head is Head.none:
        _probe_width(tower, prepared)
    else:
        tower.projection = Representation()
        tower.projection = build_head(config, _probe_width(tower, prepared))
    return _pair(tower, tower, config)


def _probe_width(tower: Tower, prepared: Any) -> int:
    """Run a tower once, and return the width of its output. Raises ConfigError if it cannot take its inputs (`probe`).

    prepared: the ImageSpec of its images, or the TextTokenizer of its texts.
    """
    if isinstance(prepared, ImageSpec):
        return probe_images(tower, prepared)
    return probe(tower, prepared(["a"], prepared.limit), TOKENS_REFUSED)


def _text_encoder(config: ModelConfig, load_pretrained: bool) -> tuple[Tower, TextTokenizer]:
    """Build a text tower from a transformers encoder, and its tokenizer, see `build_text_encoder`.

    Also raises ConfigError for another model.text.kind, and for an encoder that takes texts of one length only
    (SigLIP).
    """
    if (kind := config.text.kind) is not TextTower.transformers:
        raise ConfigError(
            f"model.text.kind={kind}: questions, passages and views take model.text.kind=transformers, as of "
            "model=encoder model.text.name=FOLDER"
        )
    tower, tokenize = build_text_encoder(BuildContext(config, load_pretrained))
    if isinstance(tower.trunk, Pooled) and tower.trunk.one_length:
        problem = f"model.text.name={config.text.name or config.name}: it takes texts of one length"
        raise ConfigError(f"{problem}. Take both of its towers: task=image_text model=transformers model.name=…")
    return tower, tokenize


def _saved_calibration(config: ModelConfig, load_pretrained: bool) -> Calibration | None:
    """Return the logit scale and bias saved in the export of Dyad that the text tower is loaded from.

    Returns None if the tower is not loaded from an export, or the export has no logit scale. Raises ConfigError as
    `exported`.
    """
    name = config.text.name or config.name
    trained = load_pretrained and not config.text.from_scratch
    return exported(name, f"model.text.name={name}")[1] if trained and name else None


def _pair(x_tower: Tower, y_tower: Tower, config: ModelConfig) -> TwoTower:
    """Return the towers as a TwoTower in train() mode; change their batch norms, in place, as model.batch_norm says.

    If both are one object, the TwoTower has it once.
    """
    towers = TwoTower(x_tower, y_tower).train()
    set_batch_norms(towers, config.batch_norm)
    return towers


def share_towers(towers: TwoTower, main_towers: TwoTower, whole: bool = True) -> None:
    """Replace towers of `towers`, in place, by towers of `main_towers` with equal modules and shapes of weights.

    Compared are the classes of modules, and names and shapes of weights, never their values. If only the trunks are
    alike, the trunk and the module `prepare` are replaced, and the projection stays. A tower of vectors of classes is
    never replaced, as other losses may have other classes. A side takes the x tower of the run if that fits, else the
    y tower. towers: the towers of an auxiliary loss. main_towers: the towers of the run. whole=False: share trunks
    only. Raises ConfigError if nothing is shared.
    """

    def parts(module: nn.Module) -> list[Any]:  # other kinds of batch norm or activation have the same shapes
        shapes = [(key, tensor.shape) for key, tensor in module.state_dict().items()]
        return [shapes, *map(type, module.modules())]

    shared = False
    for side in ("x_tower", "y_tower"):
        for own in (main_towers.x_tower, main_towers.y_tower):
            tower = getattr(towers, side)
            if type(tower) is Tower and isinstance(tower.trunk, nn.Embedding):
                continue
            if whole and parts(tower) == parts(own):
                setattr(towers, side, own)
            elif isinstance(tower, Tower) and isinstance(own, Tower) and parts(tower.trunk) == parts(own.trunk):
                tower.prepare, tower.trunk = own.prepare, own.trunk
            else:
                continue
            shared = True
            break
    if not shared:
        raise ConfigError("shares no tower with the run: its model.* keys make others")
