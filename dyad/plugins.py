"""Functions for plugins: register an objective, a tower, a format of question files, an evaluator or a tracker.

A plugin is a Python module of your own, outside this repository, that you name on the command line:

    python -m train plugins=[my_module] objective=my_objective …

It is imported in every process before the configuration is composed. CONTRIBUTING.md has an example of each kind.
Registering imports no torch, so `--help` stays quick with plugins whose own imports of torch stand inside functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dyad.data.base.errors import ConfigError
from dyad.data.question_passage.formats import FORMATS, QuestionFormat
from dyad.evaluation.suite import KINDS
from dyad.evaluation.suite_entry import SuiteKind
from dyad.train.cli.presets import groups
from dyad.train.config import OWN_IMAGE_TOWERS, OWN_TEXT_TOWERS, ImageTower, TextTower
from dyad.train.losses import OBJECTIVES
from dyad.train.losses.options.common import ObjectiveOptions, preset
from dyad.train.tracking.trackers import TRACKERS, Tracker

if TYPE_CHECKING:
    from torch import Tensor

    from dyad.train.towers.image.image_tower import ImageParts
    from dyad.train.towers.libraries.open_clip import BuildContext
    from dyad.train.towers.tower import Tower


def register_objective(name: str, options: type[ObjectiveOptions]) -> None:
    """Make an objective available as objective=NAME. Raises ConfigError if the name is taken.

    options: the dataclass of its options. Its attribute `formula` is a subclass of Objective, or "module:Class", which
    is imported when the objective is built. A subclass of `options` with this name is registered, not `options` itself.
    """
    _add(OBJECTIVES, name, preset(name, options), "objective", groups()["objective"])


def register_image_tower(name: str, build: Callable[[BuildContext], ImageParts]) -> None:
    """Make an image tower available as model.image.kind=NAME. Raises ConfigError if the name is taken.

    build: returns the trunk, the projection to the shared space, and an ImageSpec: the size and normalisation of the
    images (b, 3, S, S) that the trunk takes.
    """
    _add(OWN_IMAGE_TOWERS, name, build, "model.image.kind", ImageTower)


def register_text_tower(
    name: str, build: Callable[[BuildContext], tuple[Tower, Callable[[list[str]], Tensor]]]
) -> None:
    """Make a text tower for captions available as model.text.kind=NAME. Raises ConfigError if the name is taken.

    build: returns the tower, and a tokenizer from n texts to token ids, int64 (n, L), with the same L in all batches.
    """
    _add(OWN_TEXT_TOWERS, name, build, "model.text.kind", TextTower)


def register_format(added: QuestionFormat) -> None:
    """Add a format of question files, which is tried before all formats that were added earlier.

    A row is read in this format if it has both fields that `added.question` and `added.positives` name. Raises
    ConfigError if another format has the same names for these two fields.
    """
    if any((f.question, f.positives) == (added.question, added.positives) for f in FORMATS):
        raise ConfigError(f"a format of rows with {added.question} and {added.positives} exists already")
    FORMATS.insert(0, added)


def register_evaluator(name: str, kind: SuiteKind) -> None:
    """Make data sets available as entries NAME:TARGET of eval.suite. Raises ConfigError if the name is taken.

    kind: the task of the models, and the functions that check such an entry and build its evaluator.
    """
    _add(KINDS, name, kind, "eval.suite")


def register_tracker(name: str, tracker: type[Tracker]) -> None:
    """Add a tracker, which sends the logged metrics of a run to a service such as W&B.

    name: its name in messages and in the table TRACKERS. A run uses it if tracker.is_on(config.tracking) is true.
    Raises ConfigError if the name is taken.
    """
    _add(TRACKERS, name, tracker, "tracker")


def _add(table: dict[str, Any], name: str, value: Any, what: str, ours: Any = ()) -> None:
    """Set table[name] to `value`. Raises ConfigError if `name` is a key of `table`, or one of the reserved names
    `ours`. what: the configuration key, for the message."""
    if name in table or name in list(ours):
        raise ConfigError(f"{what}={name} exists already. Choose another name")
    table[name] = value
