"""Dyad: distributed CLIP and DPR training. Importing this package loads nothing heavy, such as torch.

    import dyad

    model = dyad.load("runs/x")  # also an export folder, "open_clip:ViT-B-32@FILE", "st:FOLDER": dyad/model.py
    scores = model.similarity(model.encode_image(["frog.jpg"]), model.encode_text(["a frog", "a toad"]))
    hits = model.search(model.index("my_pictures"), "a frog", k=5)

The names in __all__ are the public interface; what they need is imported when a name is first used. Begin with
help(dyad.load) and help(dyad.Model). In a checkout `train`, `data`, `eval` and `configs` are links to the
folders at the top of the repository. The installed wheel holds the folders themselves.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dyad.data.base.errors import ConfigError, DataError
    from dyad.evaluate_model import evaluate
    from dyad.index import Hit, Index
    from dyad.load_model import load
    from dyad.model import Model
    from dyad.train.losses import OBJECTIVES, build_objective
    from dyad.train.losses.gathered.batch import Columns
    from dyad.training_batches import Batch, batches

MODULES = {
    "dyad.data.base.errors": ("ConfigError", "DataError"),
    "dyad.train.losses": ("OBJECTIVES", "build_objective"),
    "dyad.train.losses.gathered.batch": ("Columns",),
    "dyad.index": ("Hit", "Index"),
    "dyad.load_model": ("load",),
    "dyad.model": ("Model",),
    "dyad.evaluate_model": ("evaluate",),
    "dyad.training_batches": ("Batch", "batches"),
}
__all__ = ["OBJECTIVES", "Batch", "Columns", "ConfigError", "DataError", "Hit", "Index", "Model", "batches"]
__all__ += ["build_objective", "evaluate", "load"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    for module, names in MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'dyad' has no attribute '{name}'")
