"""Auxiliary losses of a run (also.NAME), which train the run's towers on a task, data and objective of their own.

The value of also.NAME is a text of arguments as on the command line, e.g. "task=views objective=simclr data.train=a.tar
weight=0.5". The configuration of the loss is that of the run, changed by these arguments. Imports no torch.
"""

import copy
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from dyad.data.base.errors import ConfigError, UserError, raise_broken
from dyad.data.config import Mode
from dyad.train.arguments import as_argument
from dyad.train.checkpoint_config import CheckpointConfig
from dyad.train.cli.compose import compose_config, words_for
from dyad.train.cli.unread_keys import refuse_unread
from dyad.train.config import TargetConfig, Task, TrainConfig
from dyad.train.run_folder.folder import all_keys

# Keys, and sections of keys, that an auxiliary loss may have; all others are of the whole step or run
OWN = "task objective data model weight global_batch_size chunk_size eval.suite".split()
TAKEN = ("towers", "objective")  # names of weights of the run
# Keys of model.* that change a loss though its towers are the run's: those of its projection and of its inputs, and
# model.batch_norm, which `share_towers` compares, as a head may have the only batch norms
OF_LOSS = "embed_dim head head_width classes shared batch_norm image.image_size text.context_length text.lower_case "
OF_LOSS += "text.dense text.end_token"

_last: list[tuple[TrainConfig, dict[str, TrainConfig]]] = []  # a start asks four times, and composing takes a second


def auxiliary_configs(config: TrainConfig) -> dict[str, TrainConfig]:
    """Return name → the configuration of each auxiliary loss of a run; {} without also.NAME.

    It is the run's configuration, changed by the arguments of also.NAME. The keys weight, eval.suite, target.*,
    checkpoint.* and experiment are not taken from the run but have their defaults. A section (objective, data, model)
    that the arguments choose anew has the values of its preset. Calls in a row with an equal configuration return the
    same objects: do not change them. Raises ConfigError, naming also.NAME, for arguments that cannot be composed or
    would not be read, and for what an auxiliary loss cannot have. Rules of values are left to `check_values`.
    """
    if not config.also:
        return {}
    if not _last or _last[0][0] != config:
        _last[:] = [(copy.deepcopy(config), _composed(config))]  # start defaults change a configuration in place
    return dict(_last[0][1])


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Context manager: the message of a UserError that is raised in the block begins with also.`name`."""
    try:
        yield
    except UserError as error:
        error.args = tuple(f"also.{name}: {message}" for message in error.args if message)  # none of a stop signal
        raise


def refuse_keys_of_shared_towers(config: TrainConfig, own: TrainConfig) -> None:
    """Raise ConfigError for keys of model.* that an auxiliary loss sets for a tower of the run, which ignores them.

    config: that of the run. own: that of the auxiliary loss. A tower is that of the run if the run has one of its kind,
    images or texts. Keys of OF_LOSS, which change the loss itself, are never refused.
    """
    images, texts = (not own.has_images or config.has_images), (not own.has_texts or config.has_texts)
    read = {"image": own.has_images and images, "text": own.has_texts and texts}
    read["context"] = config.task is own.task is Task.sequence
    there = all_keys(config.model)
    raise_broken(
        f"model.{key}={as_argument(value)}: the tower is that of the run, which has {as_argument(there[key])}. Leave "
        "it out, or set it for the run"
        for key, value in all_keys(own.model).items()
        if value != there[key] and key not in OF_LOSS.split() and read.get(key.partition(".")[0], images and texts)
    )


def _composed(config: TrainConfig) -> dict[str, TrainConfig]:
    """Return what `auxiliary_configs` returns, composed anew."""
    found: dict[str, TrainConfig] = {}
    run, evaluation = replace(config.run, classes=None, prompts=None, inputs=None), replace(config.eval, suite=[])
    # without the recipe, whose options of its objective another objective may not have
    own = {"also": {}, "weight": 1.0, "target": TargetConfig(), "checkpoint": CheckpointConfig(), "experiment": None}
    run_words = words_for(replace(config, run=run, eval=evaluation, **own))
    for name, text in config.also.items():
        try:
            found[name] = _auxiliary_config(config, run_words, name, shlex.split(str(text)))
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"also.{name}: {error}") from error
    return found


def _auxiliary_config(config: TrainConfig, run_words: list[str], name: str, words: list[str]) -> TrainConfig:
    """Compose the configuration of the auxiliary loss also.`name` from `run_words` and its own arguments `words`.

    run_words: key=value arguments that compose to `config`, that of the run. Raises ConfigError for a name that is
    invalid or taken, a key outside OWN, a key that the loss would not read, and options that only the run's loss may
    have.
    """
    own = [word.partition("=")[0] for word in words]
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in (*TAKEN, config.task):
        taken = " and ".join([*TAKEN, config.task])
        raise ConfigError(f"its name must be small letters, digits and '_'; {taken} are names of the run's own")
    if foreign := [key for key in own if not any(key == one or key.startswith(f"{one}.") for one in OWN)]:
        raise ConfigError(f"{foreign[0]} is of the whole run. An auxiliary loss has keys of its own: {', '.join(OWN)}")
    # what stands in a section that an argument chooses anew, such as objective=simclr, is not that of the run
    replaced = tuple(f"{key}." for key in own if key in ("objective", "data", "model"))
    if any(key.partition(".")[0] in ("objective", "model") for key in own):
        replaced += ("from_weights",)
    kept = [word for word in run_words if word.partition("=")[0] not in own and not word.startswith(replaced)]
    result = compose_config([*kept, *words])
    refuse_unread(words, [replace(result, also={name: ""})])  # its weight is read
    if result.objective.draws:
        raise ConfigError(f"objective.noise={result.objective.draws}: only the run's own loss can draw its noise")
    if result.objective.by_sample_id or result.data.mode is Mode.stream or result.data.negatives.refresh_every:
        raise ConfigError(
            "only the run's own loss can have an objective with numbers of each sample, data.mode=stream, or "
            "data.negatives.refresh_every"
        )
    return result
