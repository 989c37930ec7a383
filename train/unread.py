"""Keys that a run would not read: what somebody chose and nothing would do is refused. Torch-free.

A key is chosen when it is typed and its value is not the default; what a recipe sets is not. `WHERE` says what must
hold for a key, or all that begin so, to be read. Keys that are not listed are read by every run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from data.config import Mode
from data.errors import ConfigError
from train.config import ImageTower, Schedule, Task, TextTower, TrainConfig
from train.runs.folder import all_keys

Where = tuple[str, Callable[[TrainConfig], bool], str]


def _pictures(config: TrainConfig) -> bool:
    return config.task is Task.image_text


def _is(config: TrainConfig, option: str, *values: str | bool) -> bool:
    """Whether the objective has an option of one of these values."""
    value = getattr(config.objective, option, None)
    return getattr(value, "value", value) in values


def _open_clip(config: TrainConfig) -> tuple[bool, bool]:
    """Whether the picture tower is open_clip's, and whether the text tower is."""
    model = config.model
    return _pictures(config) and model.image.kind is ImageTower.open_clip, model.text.kind is TextTower.open_clip


# What must hold; whether it does; the keys that are read then only
WHERE: list[Where] = [
    (
        "task=image_text",
        _pictures,
        "model.image. data.image_key data.captions data.caption_weights data.text_key data.resize "
        "data.max_image_pixels data.augment. data.mode eval.truth eval.recall_k",
    ),
    (
        "task=question_passage",
        lambda c: not _pictures(c),
        "model.shared data.question. data.passage. data.negatives. eval.depth eval.answers eval.embedding",
    ),
    (
        "model.text.kind=transformers",
        lambda c: c.model.text.kind is TextTower.transformers,
        "model.text.pooling model.text.lower_case model.text.dense model.text.from_scratch model.text.lora_",
    ),
    ("model.embed_dim=null", lambda c: c.model.embed_dim is None, "model.text.dense"),
    ("model.text.kind=open_clip", lambda c: _open_clip(c)[1], "model.text.pretrained"),
    ("model.image.kind=open_clip or model.text.kind=open_clip", lambda c: any(_open_clip(c)), "model.pretrained"),
    (
        "a tower that has no projection of its own (transformers, timm, cnn)",
        lambda c: not all(_open_clip(c)),
        "model.embed_dim",
    ),
    ("model.image.kind=cnn", lambda c: c.model.image.kind is ImageTower.cnn, "model.image.widths"),
    (
        "model.image.kind=open_clip or timm",
        lambda c: c.model.image.kind is not ImageTower.cnn,
        "model.image.name model.image.pretrained",
    ),
    ("model.image.frozen=true", lambda c: c.model.image.frozen, "model.image.unlocked_groups"),
    ("model.text.frozen=true", lambda c: c.model.text.frozen, "model.text.unlocked_layers"),
    (
        "model.text.lora_rank above 0",
        lambda c: c.model.text.lora_rank > 0,
        "model.text.lora_alpha model.text.lora_targets",
    ),
    ("data.mode=stream", lambda c: c.data.mode is Mode.stream, "data.buffer"),
    ("data.negatives.per_row above 0", lambda c: c.data.negatives.per_row > 0, "data.negatives.lists"),
    (
        "data.negatives.refresh_every above 0",
        lambda c: c.data.negatives.refresh_every > 0,
        "data.negatives.mining.",
    ),
    (
        "optim.schedule=const-cooldown",
        lambda c: c.optim.schedule is Schedule["const-cooldown"],
        "optim.cooldown",
    ),
    ("objective.divergence=cvar", lambda c: _is(c, "divergence", "cvar"), "objective.alpha"),
    (
        "objective.pair_loss=hinge or squared_hinge",
        lambda c: _is(c, "pair_loss", "hinge", "squared_hinge"),
        "objective.margin",
    ),
    ("objective.nu=state", lambda c: _is(c, "nu", "state"), "objective.nu_lr"),
    (
        "objective.nu=state or objective.noise=uniform",
        lambda c: c.objective.by_sample_id or _is(c, "noise", "uniform"),
        "objective.num_samples objective.memory_budget_mb",
    ),
    (
        "a learning or per-sample temperature",
        lambda c: _is(c, "learnable", True) or hasattr(c.objective, "max_temperature"),
        "objective.min_temperature",
    ),
    ("your own loop that gives both views as one tensor", lambda c: False, "objective.views"),
    ("objective.lambda_momentum above 0", lambda c: bool(c.objective.lambda_momentum), "objective.width"),
]


def refuse_unread(words: Iterable[str], configs: Sequence[TrainConfig]) -> None:
    """Raise ConfigError for keys that these words chose and that none of their runs would read."""
    typed = [word.partition("=")[0] for word in words]
    chosen = {key: value for config in configs for key, value in _chosen(config).items() if _is_of(key, typed)}
    broken = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}: this run does not read it, only one with "
        f"{where}. Leave it out, or set that"
        for key, value in chosen.items()
        for where, holds, keys in WHERE
        if key.startswith(tuple(keys.split())) and not any(map(holds, configs))
    ]
    if broken:
        raise ConfigError("\n".join(broken[:5]))


def _chosen(config: TrainConfig) -> dict[str, Any]:
    """Keys whose value is not the default."""
    defaults = all_keys(TrainConfig(objective=type(config.objective)()))  # type: ignore[operator]
    return {key: value for key, value in all_keys(config).items() if value != defaults.get(key)}


def _is_of(key: str, typed: Sequence[str]) -> bool:
    """Whether one of the typed names is this key or its section; a name without a dot chose from a group."""
    return any(key == name or ("." in name and key.startswith(f"{name}.")) for name in typed)
