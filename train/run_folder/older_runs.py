"""What older runs called and meant by the keys of their config.yaml, in the terms of this version. Needs no torch."""

from typing import Any

from dyad.data.config import CaptionPer
from dyad.train.config import Activation
from dyad.train.losses.options.choices import Noise

# Keys that have had another name
RENAMED = {"optim.patience": "optim.max_skipped", "model.memo_mb": "model.frozen_cache_mb"}
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
