"""Refuse keys on the command line that would have no effect in the run. Imports no torch.

A key is refused if it is typed on the command line, its value is neither the default nor null, and the run does not
meet a condition that READ_ONLY_WITH lists for it; in a sweep, if none of the runs meets it. Keys that a recipe sets are
never refused. Every run reads the keys that are not listed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dyad.data.base.errors import raise_broken
from dyad.train.arguments import as_argument
from dyad.train.cli.command_line import parse_argument
from dyad.train.config import OWN_IMAGE_TOWERS, OWN_TEXT_TOWERS, ImageTower, TextTower, TrainConfig
from dyad.train.run_folder.folder import all_keys

IMAGES = "task=image_text, or data.items=pictures of another task"
TEXTS = "task=image_text, question_passage or language_model, or data.items=texts"
NO_IMAGES = "task=question_passage or language_model, or data.items=texts of another task"
RANKS = "task=image_text or sequence, or data.items=pictures of another task"
FINDS = "task=question_passage, language_model or sequence, or data.items=texts of another task"
LABELS = "task=image_text or labelled, or data.items=pictures of another task"
EMBEDS = "a task other than language_model"
UNNAMED = "a tower that has no name of its own, such as model=open_clip"
IMAGE_OPEN_CLIP = "model.image.kind=open_clip or model.text.kind=open_clip"
HEAD = "a model.head with hidden layers"
LIBRARIES = "a tower of open_clip, timm or transformers"
OWN_PROJECTION = "a tower that has no projection of its own (transformers, timm, cnn), or a model.head"
SAMPLE_IDS = "objective.nu=state or objective.density=uniform"
OF_TIMM = "an optim.name other than adamw"
SEVERAL = "auxiliary losses, also.NAME=…"
DRAWS = "data.negatives.per_row or data.negatives.pictures above 0"
TEMPERATURE = "a learning or per-sample temperature"
DIVERGES = "objective.divergence=kl or chi2, or objective.nu=state"
WHOLE = "dist=ddp, or dist.shard_size=1"
EVALUATES = "data.val or eval.suite"
CVAR = "objective.divergence=cvar"
MOMENTS = "objective.lambda_momentum above 0"

# Condition → keys that only a run with it reads, and with each all keys that begin so
READ_ONLY_WITH = {
    IMAGES: "model.image. data.image_key data.resize data.max_image_pixels data.augment. data.augment_y",
    RANKS: "eval.recall_k",
    FINDS: "eval.depth",
    LABELS: "data.template",
    TEXTS: "model.text.",
    "task=image_text": "data.captions data.caption_per data.caption_weights data.text_key data.mode "
    "data.negatives.fields data.negatives.picture eval.truth",
    "task=image_text or question_passage": "data.relevance",
    "task=image_text or question_passage or language_model": "data.negatives.",
    "task=views": "data.augment_y model.head",
    HEAD: "model.head_width",
    "task=views or labelled or sequence": "data.items",
    "task=sequence": "data.sequence. model.context. eval.seen",
    "data.items=texts or pictures": "data.sequence.items",
    "model.context.kind=transformer": "model.context.heads",
    "objective=cpc": "model.context.embed_dim",
    "task=labelled": "model.classes data.label data.classes data.rare",
    "data.rare=CLASS": "data.rare_per_batch",
    "data.rare=null": "model.classes data.classes eval.index model.embed_dim",
    "task=question_passage": "data.teacher model.shared data.negatives.refresh_every",
    "task=question_passage or language_model": "data.passage.corpus data.passage.positives data.passage.pos_pool "
    "data.passage.neg_pool",
    NO_IMAGES: "data.question. data.passage. eval.answers eval.embedding",
    "model.text.kind=transformers": "model.text.pooling model.text.lower_case model.text.dense model.text.from_scratch "
    "model.text.end_token",
    "model.text.kind=open_clip or transformers": "model.text.lora_",
    EMBEDS: "model.text.end_token",
    "model.embed_dim=null": "model.text.dense",
    "model.text.kind=open_clip": "model.text.pretrained",
    UNNAMED: "model.name",
    IMAGE_OPEN_CLIP: "model.pretrained model.activation",
    LIBRARIES: "model.grad_checkpointing",
    OWN_PROJECTION: "model.embed_dim",
    "model.image.kind=cnn": "model.image.widths",
    "model.image.kind=open_clip or timm or transformers": "model.image.name",
    "model.image.kind=open_clip or timm": "model.image.pretrained",
    "model.image.kind=transformers": "model.image.from_scratch",
    "model.image.frozen=true": "model.image.unlocked_groups",
    "model.text.frozen=true": "model.text.unlocked_layers",
    "model.image.lora_rank above 0": "model.image.lora_alpha model.image.lora_targets",
    "model.text.lora_rank above 0": "model.text.lora_alpha model.text.lora_targets",
    "data.mode=stream": "data.buffer",
    DRAWS: "data.negatives.lists",
    "data.negatives.per_row above 0": "data.negatives.fields",
    "data.negatives.pictures above 0": "data.negatives.picture_",
    "data.negatives.refresh_every above 0": "data.negatives.mining.",
    "optim.schedule=const-cooldown or wsd": "optim.cooldown",
    "optim.schedule=const-cooldown": "optim.cooldown_power",
    "optim.name=adamw": "optim.beta optim.eps",
    OF_TIMM: "optim.options",
    SEVERAL: "weight",
    WHOLE: "keep_graphs model.frozen_cache_mb",
    EVALUATES: "eval.every",
    "plan.dry_run=null": "plan.on plan.gpu plan.mfu plan.network",
    "target.kind=ema": "target.momentum",
    "target.kind=copy": "target.every",
    CVAR: "objective.alpha",
    "objective.pair_loss=hinge or squared_hinge": "objective.margin",
    "objective.nu=state": "objective.nu_lr",
    "objective.noise=batch": "objective.density",
    SAMPLE_IDS: "objective.num_samples objective.memory_budget_mb",
    TEMPERATURE: "objective.min_temperature",
    DIVERGES: "objective.temperature",
    "your own loop that gives both views as one tensor": "objective.views",  # no run of this program
    MOMENTS: "objective.width",
}


def refuse_unread(words: Iterable[str], configs: Sequence[TrainConfig], auxiliary: Sequence[TrainConfig] = ()) -> None:
    """Raise ConfigError if the command line sets keys that none of its runs would read.

    A value that is the key's default, or null, is not refused as unread. In a sweep, different runs may meet different
    conditions of a key. Also raises ConfigError for objective.temperature if objective.init_scale, its inverse, says
    another value. words: the key=value arguments of the command line. configs: the configuration of each of its runs;
    several in a sweep. auxiliary: those of auxiliary losses (also.NAME), which read what they take from the run.
    """
    typed = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    chosen = {key: value for config in configs for key, value in _chosen(config).items() if _is_typed(key, typed)}
    raise_broken(
        f"{key}={as_argument(value)}: this run does not read it, only one with {condition}. Leave it out, or set that"
        for key, value in chosen.items()
        if value is not None  # null asks for nothing
        for condition in unmet(key, [*configs, *(own for own in auxiliary if all_keys(own).get(key) == value)])
    )
    start = typed.get("objective.temperature")
    number = parse_argument(f"objective.temperature={start}").value()  # of 0.10, the number 0.1
    raise_broken(
        f"objective.temperature={start}: objective.init_scale={config.objective.init_scale} says where it starts, at "
        f"{config.objective.temperature}. Leave one of them out"
        for config in configs
        if start and getattr(config.objective, "init_scale", None) and number != config.objective.temperature
    )


def unmet(key: str, configs: Sequence[TrainConfig]) -> list[str]:
    """Return those conditions of the dotted `key` in READ_ONLY_WITH that none of `configs` fulfils.

    key: e.g. "optim.lr". A run reads the key only if it fulfils each of its conditions. The list is empty if for each
    condition there is a configuration that fulfils it.
    """
    conditions = [condition for condition, keys in READ_ONLY_WITH.items() if key.startswith(tuple(keys.split()))]
    return [condition for condition in conditions if not any(_holds(condition, config) for config in configs)]


def _holds(condition: str, config: TrainConfig) -> bool:
    """Whether a configuration meets a condition of the table READ_ONLY_WITH.

    A condition is a name in the table SPECIAL, "KEY above 0", "KEY=VALUE", or "KEY=VALUE or VALUE". A tower of a plugin
    meets every condition on its kind, as nobody knows which keys it reads.
    """
    if condition in SPECIAL:
        return SPECIAL[condition](config)
    key, _, values = condition.partition("=")
    value = all_keys(config).get(key.removesuffix(" above 0"), "")
    if value in {**OWN_IMAGE_TOWERS, **OWN_TEXT_TOWERS} and key.endswith(".kind"):  # nobody knows what it reads
        return True
    if not values:
        return bool(value) and value > 0
    return as_argument(value) in values.split(" or ")


def _open_clip(config: TrainConfig) -> set[bool]:
    """Return, as a set, whether the image tower is of open_clip and whether the text tower is, for towers that exist.

    {True}: all towers of the run are of open_clip; {False}: none is; {True, False}: one of two is.
    """
    image, text = config.model.image.kind is ImageTower.open_clip, config.model.text.kind is TextTower.open_clip
    return {*[image] * config.has_images, *[text] * config.has_texts}


def _has_unnamed(config: TrainConfig) -> bool:
    """Whether a tower of the run takes its name from model.name, as its own key, such as model.text.name, is null."""
    image, text = config.model.image, config.model.text
    is_image = config.has_images and image.kind != ImageTower.cnn and image.name is None
    return is_image or (config.has_texts and text.name is None)


SPECIAL: dict[str, Callable[[TrainConfig], bool]] = {
    IMAGES: lambda config: config.has_images,
    RANKS: lambda config: config.has_images or config.task == "sequence",
    "objective=cpc": lambda config: getattr(config.objective, "context_width", ...) is not ...,
    TEXTS: lambda config: config.has_texts,
    FINDS: lambda config: not config.has_images or config.task == "sequence",
    LABELS: lambda config: config.has_images or config.task == "labelled",
    NO_IMAGES: lambda config: config.has_texts and not config.has_images,
    EMBEDS: lambda config: config.task != "language_model",
    UNNAMED: _has_unnamed,
    IMAGE_OPEN_CLIP: lambda config: any(_open_clip(config)),
    LIBRARIES: lambda c: c.has_texts or (c.has_images and c.model.image.kind != ImageTower.cnn),
    OWN_PROJECTION: lambda config: _open_clip(config) != {True} or config.model.head != "none",
    EVALUATES: lambda config: config.evaluates,
    CVAR: lambda c: c.objective.inputs == "scores" or all_keys(c).get("objective.divergence") == "cvar",
    SAMPLE_IDS: lambda c: c.objective.by_sample_id or all_keys(c).get("objective.density") == "uniform",
    MOMENTS: lambda c: getattr(c.objective, "lambda_momentum", 1) > 0,  # cpc always reads its width
    "data.rare=CLASS": lambda config: config.data.rare is not None,
    HEAD: lambda config: config.model.head not in ("none", "linear"),
    OF_TIMM: lambda config: config.optim.name != "adamw",
    SEVERAL: lambda config: bool(config.also),
    DRAWS: lambda config: config.data.negatives.per_row + config.data.negatives.pictures > 0,
    DIVERGES: lambda c: getattr(c.objective, "divergence", "") != "cvar" or getattr(c.objective, "nu", "") == "state",
    WHOLE: lambda config: config.dist.name == "ddp" or config.dist.shard_size == 1,
    TEMPERATURE: lambda c: getattr(c.objective, "learnable", False) or hasattr(c.objective, "max_temperature"),
}


def _chosen(config: TrainConfig) -> dict[str, Any]:
    """Return dotted key → value for the keys whose value is not the default of TrainConfig or of the objective."""
    defaults = all_keys(TrainConfig(objective=type(config.objective)()))  # type: ignore[operator]
    return {key: value for key, value in all_keys(config).items() if value != defaults.get(key)}


def _is_typed(key: str, typed: Iterable[str]) -> bool:
    """Whether the user typed this key on the command line, or a section that contains the key.

    typed: the names before "=" of all arguments. A section counts only if its name has a dot (model.text, not model),
    because model=NAME chooses a preset and sets no single key.
    """
    return any(key == name or ("." in name and key.startswith(f"{name}.")) for name in typed)
