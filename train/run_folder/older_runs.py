"""Tables and functions that translate the config.yaml of runs of older versions to the keys of this version.

Needs no torch.
"""

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
# Key that older versions did not have → the value with which it is left out of the hash in a run's name, so that names
# of older runs stay the same
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
    "model.text.end_token": False,
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
    **dict.fromkeys(("data.classes", "data.rare", "data.relevance", "data.teacher"), None),
    "data.rare_per_batch": 8,
    "model.classes": "learnt",
    "data.augment.jitter": [0.0, 0.0, 0.0, 0.0],
    "data.augment.jitter_prob": 1.0,
    "data.augment.blur": 0.0,
    "data.augment.blur_sigma": [0.1, 2.0],
    "data.augment.solarise": 0.0,
    "objective.matryoshka": [],
    "eval.width": None,
    "checkpoint.patience": None,
    "checkpoint.keep_every": None,
    **{f"{section}.{key.name}": key.default for section, options in SECTIONS.items() for key in fields(options)},
}
# Keys whose value in an older run is unknown if its config.yaml lacks them; others had the value in ADDED
UNRECORDED = ("model.batch_norm", "model.text.lower_case", "model.text.dense", "from_weights")
# Keys that are left out of the hash in a run's name, whatever their value, but compared when a run resumes
UNNAMED = ("from_weights", "model.activation", "data.caption_per")
# Older runs of objective=nce had the value of objective.density in objective.noise; their noise was the batch
NCE, NOISE, DENSITY = "nce", "noise", "density"


def in_present_terms(tree: dict[str, Any]) -> dict[str, Any]:
    """Change the keys and values of a parsed config.yaml, in place, to those of this version, and return the tree."""
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
    """Return `keys` (dotted key → value) under the names that they had in older versions, for the hash in run names.

    Only with objective=nce and objective.noise=batch is anything changed: the value of objective.density is moved to
    objective.noise. Otherwise `keys` itself is returned.
    """
    if (keys.get("objective.name"), keys.get(f"objective.{NOISE}")) != (NCE, Noise.batch):
        return keys
    rest = {key: value for key, value in keys.items() if key != f"objective.{DENSITY}"}
    return {**rest, f"objective.{NOISE}": keys[f"objective.{DENSITY}"]}
