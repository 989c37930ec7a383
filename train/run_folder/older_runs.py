"""What older runs called and meant by the keys of their config.yaml, in the terms of this version. Needs no torch."""

from dataclasses import fields
from typing import Any

from dyad.data.config import CaptionPer, SequenceConfig
from dyad.train.config import Activation
from dyad.train.context_config import ContextConfig
from dyad.train.losses.options.choices import Noise

# Keys that have had another name
RENAMED = {"optim.patience": "optim.max_skipped", "model.memo_mb": "model.frozen_cache_mb"}
# Sections that older runs do not have
SECTIONS = {"data.sequence": SequenceConfig, "model.context": ContextConfig}
# Keys that older runs do not have, with the value that does not enter a run's name: the names of those runs stay
ADDED = {
    "data.columns": [],
    "data.template": None,
    "data.negatives.fields": ["hard_negatives"],
    "data.negatives.pictures": 0,
    "data.negatives.picture_fields": ["negative.jpg", "negative.png", "negative.webp"],
    "data.negatives.picture_file": None,
    "model.batch_norm": "global",
    "model.text.lower_case": False,
    "model.text.dense": False,
    "optim.name": "adamw",
    "optim.layer_decay": None,
    "optim.ema": None,
    "model.image.from_scratch": False,
    "model.image.patch_dropout": None,
    "model.image.lora_rank": 0,
    "model.image.lora_alpha": 16.0,
    "model.image.lora_targets": None,
    "data.batches": "mixed",
    "weight": 1.0,
    "target.kind": "none",
    "target.momentum": 0.996,
    "target.momentum_end": 1.0,
    "target.every": 1,
    "model.head": "none",
    "model.head_width": None,
    "data.items": "pictures",
    "data.label": "cls",
    **dict.fromkeys(("data.classes", "data.rare", "data.relevance"), None),
    "data.rare_per_batch": 8,
    "model.classes": "learnt",
    "data.augment.jitter": [0.0, 0.0, 0.0, 0.0],
    "data.augment.jitter_prob": 1.0,
    "data.augment.blur": 0.0,
    "data.augment.blur_sigma": [0.1, 2.0],
    "data.augment.solarise": 0.0,
    **{f"{section}.{key.name}": key.default for section, options in SECTIONS.items() for key in fields(options)},
}
# … of these only the runs themselves know what they had; the others were as ADDED says
UNRECORDED = ("model.batch_norm", "model.text.lower_case", "model.text.dense", "from_weights")
# Keys that do not enter a run's name, since those of older runs lack them, and are compared all the same
UNNAMED = ("from_weights", "model.activation", "data.caption_per")
NCE, NOISE, DENSITY = "nce", "noise", "density"  # older runs of it called the density noise, which was the batch


def in_present_terms(tree: dict[str, Any]) -> dict[str, Any]:
    """Change the nested keys of a config.yaml in place to those of this version, and return them."""
    for old, new in RENAMED.items():
        section, _, key = old.partition(".")
        if isinstance(tree.get(section), dict) and key in tree[section]:
            tree[section][new.partition(".")[2]] = tree[section].pop(key)
    if isinstance(tree.get("model"), dict) and "from_weights" not in tree:
        tree["model"]["activation"] = Activation.model.value  # older runs had GELU whatever the tag of weights says
    if isinstance(tree.get("data"), dict):
        tree["data"].setdefault("caption_per", CaptionPer.line.value)
        if isinstance(sequence := tree["data"].get("sequence"), dict):
            sequence.pop("frames_key", None)  # the suffix of frames in tars, on 27 November 2026 only
    objective = tree.get("objective")
    if isinstance(objective, dict) and objective.get("name") == NCE and NOISE in objective and DENSITY not in objective:
        objective |= {DENSITY: objective[NOISE], NOISE: Noise.batch.value}
    return tree


def in_first_terms(keys: dict[str, Any]) -> dict[str, Any]:
    """Return dotted keys as the first runs with them had them, for their names."""
    if (keys.get("objective.name"), keys.get(f"objective.{NOISE}")) != (NCE, Noise.batch):
        return keys
    rest = {key: value for key, value in keys.items() if key != f"objective.{DENSITY}"}
    return {**rest, f"objective.{NOISE}": keys[f"objective.{DENSITY}"]}
