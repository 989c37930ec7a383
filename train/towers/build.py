"""Build the two towers of a configuration, with the tokenizer of their texts."""

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError
from dyad.data.config import ItemKind
from dyad.data.image_text.transforms import ImageSpec
from dyad.data.loading.classes import ClassNumbers
from dyad.train.config import Classes, Head, ModelConfig, Task, TextTower, TrainConfig
from dyad.train.towers.batch_norm import set_batch_norms
from dyad.train.towers.calibration import Calibration, exported
from dyad.train.towers.image import build_image_tower
from dyad.train.towers.open_clip import BuildContext
from dyad.train.towers.pooled import Pooled
from dyad.train.towers.published import explained, may_download, offline_without_hub
from dyad.train.towers.rows import Grouped
from dyad.train.towers.sequence import ContextNetwork, FrameEncoder, SequenceTower
from dyad.train.towers.text import TextTokenizer, build_text_encoder, build_text_tower
from dyad.train.towers.tower import Tower, TwoTower

TOKENS_REFUSED = "model.text: this tower cannot take its tokenizer's tokens"
# (ModelConfig, load_pretrained), of task=labelled also names of classes, of task=sequence run.inputs → a model
Build = Callable[..., Any]


@dataclass(frozen=True)
class TwoTowerModel:
    """A model of two towers, which embed the two sides of a pair, and the tokenizer of their texts.

    tokenize: converts n texts to token ids, int64 (n, L), where L counts tokens. calibration: what the weights of both
    towers know of the logit of a pair; None: nothing.
    """

    towers: TwoTower
    tokenize: Any
    calibration: Calibration | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class PictureModel(TwoTowerModel):
    """A model whose x_tower takes pictures. image: size and normalisation of its input. tokenize: None if no texts."""

    image: ImageSpec


@dataclass(frozen=True)
class ImageTextModel(PictureModel):
    """A model whose x_tower takes pictures and y_tower texts.

    open_clip_config: open_clip's model_cfg if both towers come from one open_clip model, else None.
    """

    open_clip_config: dict[str, Any] | None


@dataclass(frozen=True)
class TextPairModel(TwoTowerModel):
    """A model whose x_tower takes questions and y_tower passages, or one tower that takes texts.

    tokenize: a TextTokenizer; (texts, length, pairs=None) → token ids, int64 (n, L), where L counts tokens.
    """


@dataclass(frozen=True)
class SequenceModel(TwoTowerModel):
    """A model whose one tower embeds items, and steps of sequences as contexts.

    image: of items that are pictures. width: of the embedding of an item. names: the ids of the items, of an export;
    else the log has them.
    """

    image: ImageSpec | None
    width: int
    names: Sequence[str] = ()


def build_model(config: TrainConfig, load_pretrained: bool = True) -> TwoTowerModel:
    """Build the towers of model.*, for the task, data.items and what the run found (run.classes, run.inputs).

    A single class is told from all others by one number. load_pretrained=False: build architectures only; the weights
    come from a checkpoint. Random initial weights come from torch's global generator. Raises ConfigError for an unknown
    model, weights that do not exist, inputs that a tower cannot take, or towers of different widths.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive the loader's fork
    if may_download(config.model):
        offline_without_hub()
    found = [value for value in (config.run.classes, config.run.inputs) if value is not None]
    return MODELS[config.task][config.data.items](config.model, load_pretrained, *found)


def build_image_text(config: ModelConfig, load_pretrained: bool = True) -> ImageTextModel:
    """Build the image tower and the text tower of task=image_text.

    load_pretrained=False: build architectures only, with random weights. Raises ConfigError for a model, weights or
    inputs that do not exist or do not fit.
    """
    context = BuildContext(config, load_pretrained)
    image, spec = build_image_tower(context)
    text, tokenize = build_text_tower(context)
    widths = [_probe_pictures(image, spec), _probe(text, tokenize(["a"]), TOKENS_REFUSED)]
    if widths[0] != widths[1]:
        raise ConfigError(
            f"the picture tower gives embeddings of width {widths[0]}, the text tower {widths[1]}: set model.embed_dim "
            "to the width of the tower that comes with its own projection, or take both towers from one model"
        )
    towers, model_cfg = _pair(image, text, config), context.open_clip_config()
    return ImageTextModel(towers, tokenize, spec, model_cfg, calibration=context.calibration)


def build_text_pair(config: ModelConfig, load_pretrained: bool = True) -> TextPairModel:
    """Build the towers of task=question_passage: one transformers encoder for both sides, or two with equal weights.

    model.shared decides which. load_pretrained=False: build architectures only, with random weights. Raises ConfigError
    for a model, weights or inputs that do not exist or do not fit.
    """
    generator = torch.get_rng_state()
    tower, tokenize = other, _ = _text_encoder(config, load_pretrained)
    if not config.shared:  # loaded again: a copy would hold in memory what may stay in files
        torch.set_rng_state(generator)
        other, _ = _text_encoder(config, load_pretrained)
    for encoder in dict.fromkeys((tower, other)):
        _probe(encoder, tokenize(["a"], tokenize.limit), TOKENS_REFUSED)
    return TextPairModel(_pair(tower, other, config), tokenize, calibration=_exported(config, load_pretrained))


def build_picture_views(config: ModelConfig, load_pretrained: bool = True) -> PictureModel:
    """Build one image tower for both sides. Arguments and errors as of `build_image_text`."""
    tower, spec = build_image_tower(BuildContext(config, load_pretrained))
    return PictureModel(_one_tower(tower, config, partial(_probe_pictures, tower, spec)), None, spec)


def build_text_views(config: ModelConfig, load_pretrained: bool = True) -> TextPairModel:
    """Build one transformers encoder for both sides. Arguments and errors as of `build_text_pair`."""
    tower, tokenize = _text_encoder(config, load_pretrained)
    probe = partial(_probe, tower, tokenize(["a"], tokenize.limit), TOKENS_REFUSED)
    return TextPairModel(_one_tower(tower, config, probe), tokenize)


def build_labelled(
    build_views: Build, build_prompted: Build, config: ModelConfig, load_pretrained: bool, classes: Sequence[str]
) -> TwoTowerModel:
    """Build a tower beside a vector for each class, about 1 long, or beside a text tower for prompts of the classes.

    For a single class both sides are one tower, which gives one number. build_views: builds a model of one tower.
    build_prompted: builds one with a text tower. Other arguments, and errors, as of `build_model`.
    """
    single = len(classes) == 1
    if config.classes is Classes.prompted and not single:
        return build_prompted(config, load_pretrained)
    model = build_views(replace(config, embed_dim=1) if single else config, load_pretrained)
    tower = cast(Tower, model.towers.x_tower)
    if isinstance(model, PictureModel):
        width = _probe_pictures(tower, model.image)
    else:
        width = _probe(tower, model.tokenize(["a"], model.tokenize.limit), TOKENS_REFUSED)
    if single and width != 1:
        problem = f"data.rare: the tower has a projection of its own, of width {width}, and a score is one number"
        raise ConfigError(f"{problem}. Take a picture tower of kind cnn, timm or transformers, or model.embed_dim")
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
    """Build the tower of task=sequence, which embeds items, and steps of sequences as contexts.

    item_tower: builds the tower of an item, with what prepares its inputs: a tokenizer, an ImageSpec, or None. inputs:
    run.inputs. Other arguments, and errors, as of `build_text_pair`.
    """
    items, prepared = item_tower(config, load_pretrained, inputs)
    if isinstance(prepared, ImageSpec):
        width = _probe_pictures(items, prepared)
    elif prepared is None:
        width = config.embed_dim or 0
    else:
        width = _probe(items, prepared(["a"], prepared.limit), TOKENS_REFUSED)
    tower = SequenceTower(items, ContextNetwork(config.context, width))
    spec, tokenize = (prepared, None) if isinstance(prepared, ImageSpec) else (None, prepared)
    return SequenceModel(_pair(tower, tower, config), tokenize, spec, width)


def _ids_tower(config: ModelConfig, load_pretrained: bool, count: int) -> tuple[Tower, None]:
    """Build a vector for each of `count` items, about 1 long."""
    vectors = nn.Embedding(count, _embed_dim(config))
    nn.init.normal_(vectors.weight, std=vectors.embedding_dim**-0.5)
    return Tower(vectors, nn.Identity()), None


def _frames_tower(config: ModelConfig, load_pretrained: bool, features: int) -> tuple[Tower, None]:
    width = _embed_dim(config)
    return Tower(FrameEncoder(features, 4 * width), nn.Linear(4 * width, width)), None


def _embed_dim(config: ModelConfig) -> int:
    if config.embed_dim is None:
        raise ConfigError("model.embed_dim=null: ids and frames have no width of their own. Set model.embed_dim")
    return config.embed_dim


# Task → what data.items says, where the task leaves that open → what builds the model
MODELS: dict[Task, dict[ItemKind, Build]] = {
    Task.image_text: dict.fromkeys(ItemKind, build_image_text),
    Task.question_passage: dict.fromkeys(ItemKind, build_text_pair),
    Task.views: {ItemKind.pictures: build_picture_views, ItemKind.texts: build_text_views},
    Task.labelled: {
        ItemKind.pictures: partial(build_labelled, build_picture_views, build_image_text),
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


class Representation(nn.Identity):
    """What comes before a ProjectionHead: features (b, C), of feature maps (b, C, H, W) the mean over their places."""

    def forward(self, features: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return features.mean((2, 3)) if features.dim() == 4 else features


class ProjectionHead(nn.Sequential):
    """The projection of a tower that only training needs: exports and `dyad.load` give what comes before it.

    Each choice of model.head is that of its paper's own code, with a batch norm and a ReLU after every hidden layer:

    linear     Chen et al. 2020 (SimCLR), appendix; github.com/google-research/simclr, model_util.py projection_head
    simclr     there, num_proj_layers=2: as wide as the trunk; the output too has a batch norm, which adds no bias
    simclr_v2  Chen et al. 2020 (Big Self-Supervised Models), num_proj_layers=3
    byol       Grill et al. 2020, section 3.3 and appendix: 4096, the output without batch norm
    vicreg     Bardes et al. 2022, the expander: three layers of 8192 (model.embed_dim=8192), as byol
    """

    def forward(self, features: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(Representation()(features))


# Linear layers; width of all but the last, None: that of the trunk; whether the output has a batch norm
HEADS: dict[Head, tuple[int, int | None, bool]] = {
    Head.linear: (1, None, True),
    Head.simclr: (2, None, True),
    Head.simclr_v2: (3, None, True),
    Head.byol: (2, 4096, False),
    Head.vicreg: (3, 8192, False),
}


def build_head(config: ModelConfig, width: int) -> ProjectionHead:
    """Build the head model.head, from the `width` of the trunk to model.embed_dim. model.head_width replaces the hidden
    width. Biases before batch norms would have no effect, and the papers' outputs have none: no linear layer has one.
    """
    count, published, is_normed = HEADS[config.head]
    assert config.embed_dim is not None
    widths = [width, *[config.head_width or published or width] * (count - 1), config.embed_dim]
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside, bias=False), nn.BatchNorm1d(outside), nn.ReLU()]
    layers[-2].requires_grad_(False).weight.requires_grad_(True)  # the bias of the last norm stays 0
    return ProjectionHead(*layers[: -1 if is_normed else -2])


def representation(model: TwoTowerModel) -> TwoTowerModel:
    """Return the model as it is used after training, with shared weights: towers with a ProjectionHead end before it,
    and in the place of vectors of classes stands the tower of the samples."""

    @cache
    def ended(tower: nn.Module) -> nn.Module:
        if not isinstance(tower, Tower) or not isinstance(tower.projection, ProjectionHead):
            return tower
        return Tower(tower.trunk, Representation(), prepare=tower.prepare)

    x, y = model.towers.x_tower, model.towers.y_tower
    y = x if type(y) is Tower and isinstance(y.trunk, nn.Embedding) else y
    return replace(model, towers=TwoTower(ended(x), ended(y)))


def _one_tower(tower: Tower, config: ModelConfig, probe: Callable[[], int]) -> TwoTower:
    """Make `tower` both towers, with model.head in place of its projection. probe: calls `_probe` for the tower."""
    if config.head is Head.none:
        probe()
    else:
        tower.projection = Representation()
        tower.projection = build_head(config, probe())
    return _pair(tower, tower, config)


def _text_encoder(config: ModelConfig, load_pretrained: bool) -> tuple[Tower, TextTokenizer]:
    if (kind := config.text.kind) is not TextTower.transformers:
        raise ConfigError(f"model.text.kind={kind}: questions, passages and views take model.text.kind=transformers")
    tower, tokenize = build_text_encoder(BuildContext(config, load_pretrained))
    if isinstance(tower.trunk, Pooled) and tower.trunk.one_length:
        problem = f"model.text.name={config.text.name or config.name}: it takes texts of one length"
        raise ConfigError(f"{problem}. Take both of its towers: task=image_text model=transformers model.name=…")
    return tower, tokenize


def _exported(config: ModelConfig, load_pretrained: bool) -> Calibration | None:
    """Return the calibration of an export of ours that the text tower comes from."""
    name = config.text.name or config.name
    trained = load_pretrained and not config.text.from_scratch
    return exported(name, f"model.text.name={name}")[1] if trained and name else None


def _pair(x_tower: Tower, y_tower: Tower, config: ModelConfig) -> TwoTower:
    towers = TwoTower(x_tower, y_tower).train()
    set_batch_norms(towers, config.batch_norm)
    return towers


def _probe_pictures(tower: Tower, spec: ImageSpec) -> int:
    picture = torch.zeros(1, 3, spec.size, spec.size, dtype=torch.uint8)
    return _probe(tower, picture, f"model.image: this tower cannot take pictures of {spec.size} x {spec.size}")


def share_towers(towers: TwoTower, of_run: TwoTower, name: str, whole: bool = True) -> None:
    """Let `towers` use, in place of their own, what `of_run` has of equal architecture: whole towers, or trunks.

    A trunk is shared with what prepares its inputs; the projections of two losses may differ. Vectors of classes are
    never shared: two losses may have as many, and others. name: what the message names. whole=False: share trunks only.
    Raises ConfigError if nothing is shared.
    """

    def shapes(module: nn.Module) -> list[Any]:
        return [(key, tensor.shape) for key, tensor in module.state_dict().items()]

    shared = False
    for side in ("x_tower", "y_tower"):
        for own in (of_run.x_tower, of_run.y_tower):
            tower = getattr(towers, side)
            if type(tower) is Tower and isinstance(tower.trunk, nn.Embedding):
                continue
            if whole and shapes(tower) == shapes(own):
                setattr(towers, side, own)
            elif isinstance(tower, Tower) and isinstance(own, Tower) and shapes(tower.trunk) == shapes(own.trunk):
                tower.prepare, tower.trunk = own.prepare, own.trunk
            else:
                continue
            shared = True
            break
    if not shared:
        raise ConfigError(f"{name}: shares no tower with the run: its model.* keys make others")


def _probe(tower: Tower, inputs: Tensor, problem: str) -> int:
    """Return the width D of a tower's embeddings, and freeze parameters that the embeddings do not depend on.

    DDP (torch's DistributedDataParallel) would wait for the gradients of those. A copy of the tower without memory is
    run once. When the tower cannot take `inputs`, raises ConfigError with a message that begins with `problem`.
    """
    tower.eval()
    try:
        width, used = _run_once(on_meta(tower), inputs.to("meta"))
        if inputs.dtype != torch.uint8 and _may_exceed_tables(tower, inputs):
            raise IndexError
    except Exception:  # a trunk that reads values (.tolist(), `if`), or the real run has the reason
        with explained(problem):
            width, used = _run_once(tower, inputs)
    for parameter, is_used in zip(tower.parameters(), used, strict=True):
        parameter.requires_grad_(is_used)
    return width


def _may_exceed_tables(tower: Tower, tokens: Tensor) -> bool:
    """Whether an id or a position of `tokens`, (b, L), may be beyond its table: on meta that goes unnoticed.

    Ids belong to the largest table; the smallest may be of positions, which RoBERTa counts from behind its padding_idx.
    Tables of at most two rows are of token types.
    """
    tables = [m for m in tower.modules() if isinstance(m, nn.Embedding) and m.num_embeddings > 2]
    if not tables:
        return True
    smallest = min(tables, key=lambda table: table.num_embeddings)
    largest = max(table.num_embeddings for table in tables)
    first = 0 if smallest.padding_idx is None else smallest.padding_idx + 1
    pad = tower.trunk.pad if isinstance(tower.trunk, Pooled) else 0
    return max(int(tokens.max()), pad) >= largest or first + tokens.shape[1] > smallest.num_embeddings


def on_meta(tower: Tower) -> Tower:
    """Return a copy of a tower on the meta device: its tensors have shapes and no values, so they take no memory."""
    copies: dict[int, Any] = {id(b): b.detach().to("meta") for b in tower.buffers()}
    copies[id(tower._frozen_cache)] = None  # what it holds may be large
    copies |= {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in tower.parameters()}
    return copy.deepcopy(tower, copies)


def features_on_meta(tower: Tower, inputs: Tensor) -> Tensor:
    """Return the features of a tower on the meta device. Texts count as of full length: no token can be read there."""
    if isinstance(tower.trunk, Pooled):
        return tower.trunk.encoder(input_ids=inputs).last_hidden_state[:, 0]
    return tower.trunk.encode_group(inputs) if isinstance(tower.trunk, Grouped) else tower.features(inputs)


def _run_once(tower: Tower, inputs: Tensor) -> tuple[int, list[bool]]:
    """Run a tower on `inputs`; return the width of its embeddings, and for each parameter whether it has a gradient."""
    embedding = tower.projection(features_on_meta(tower, inputs) if inputs.is_meta else tower.features(inputs))
    trained = [p for p in tower.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(embedding.sum(), trained, allow_unused=True) if trained else ()
    used = {id(p) for p, gradient in zip(trained, gradients, strict=True) if gradient is not None}
    return embedding.shape[1], [id(p) in used for p in tower.parameters()]
