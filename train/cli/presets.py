"""The presets of each group: those of configs/, and a recipe file of the user with presets in folders beside it.

experiment=PATH.yaml is read like a recipe of configs/experiment: `defaults:` names presets, the rest are keys. The file
model/mine.yaml in the recipe's folder is the preset model=mine. Paths in these files start at the working folder. The
files cannot name code to run: Hydra's ConfigStore gets them as data, and ${…} in them may only name other keys.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from dyad.data.base.errors import ConfigError
from dyad.data.base.files import leads_inside
from dyad.train.losses import OBJECTIVES
from dyad.train.run_folder.folder import config_text, flat, read_yaml

CONFIG_DIR = Path(__file__).absolute().parents[2] / "configs"  # dyad/configs
SUFFIXES = (".yaml", ".yml")
OWN = "recipe_of_yours"  # the name of the recipe in the ConfigStore: no file of configs/experiment has it
LONGEST = 200  # the most characters of the name of a preset
PACKAGE = re.compile(r"#\s*@package\s+(\S+)")


def groups(recipe: Path | None = None) -> dict[str, list[str]]:
    """Return group ("model", "data", "objective", …) → the names of its presets, sorted.

    recipe: a recipe file of the user, whose presets in folders beside it are added at the end; None: no such file. The
    group "objective" has each objective by name, plugins' too, beside its presets. The group "local", for optional
    settings of one machine (configs/local/), is left out.
    """
    found = {d.name: sorted(f.stem for f in d.glob("*.yaml")) for d in sorted(CONFIG_DIR.iterdir()) if d.is_dir()}
    found["objective"] = sorted([*OBJECTIVES, *found["objective"]])
    beside = [(group, path.stem) for group, path in _beside(recipe)]
    return {name: [*found[name], *(own for g, own in beside if g == name)] for name in sorted(found) if name != "local"}


def recipe_of(words: Sequence[str]) -> Path | None:
    """Return the recipe file that an argument experiment=PATH.yaml names; None if there is no such argument.

    words: key=value arguments. experiment=NAME, without the suffix of a file, names a preset. Raises ConfigError if the
    file does not exist or is a link that leads out of its folder.
    """
    values = [word.partition("=")[2].strip("'\"") for word in words if word.partition("=")[0] == "experiment"]
    path = next((Path(value).expanduser() for value in values if value.endswith(SUFFIXES)), None)
    if path is not None and not path.is_file():
        raise ConfigError(f"experiment={path}: no such file. Paths are relative to the working folder, {Path.cwd()}")
    if path is not None:
        _refuse_link(path)
    return path


def typed_keys(words: Sequence[str], recipe: Path | None) -> set[str]:
    """Return the dotted keys that the user set, on the command line or in a file.

    These are the keys of the arguments `words`, of the user's recipe file and the presets beside it that the recipe or
    an argument names, of configs/local, and of the preset that an argument model=NAME chooses. Names of groups are left
    out. Raises ConfigError for a file that is not YAML of keys, or whose ${…} reads anything but a key.
    """
    keys = {word.lstrip("+~").partition("=")[0] for word in words}
    files = [CONFIG_DIR / "local/default.yaml"]
    files += [CONFIG_DIR / f"model/{word.partition('=')[2]}.yaml" for word in words if word.startswith("model=")]
    files += [recipe, *(path for _, path in _chosen_beside(recipe, words))] if recipe else []
    for path in filter(Path.is_file, files):
        tree = _checked(path)
        package = PACKAGE.match(config_text(path))
        is_whole = path == recipe or path.parent.name == "local" or (package and package[1] == "_global_")
        keys |= {*flat(tree, "" if is_whole else f"{path.parent.name}.")} - {"defaults"}
    return keys - {*groups()}


def store_recipe(path: Path, words: Sequence[str]) -> None:
    """Store the user's recipe file `path` in Hydra's ConfigStore, as experiment=OWN, with the presets beside it.

    Only presets that the recipe or an argument of the command line (`words`) names are stored. Raises ConfigError for a
    file that is not YAML of keys, whose ${…} reads anything but a key, or that has the name of a preset in configs/.
    """
    store, ours = ConfigStore.instance(), groups()
    node = {**_checked(path), "experiment": str(path)}
    store.store(name=OWN, group="experiment", node=OmegaConf.create(node), package="_global_")
    for group, preset in _chosen_beside(path, words):
        if preset.stem in ours[group]:
            raise ConfigError(f"{preset}: {group}={preset.stem} is a preset of Dyad. Give the file another name")
        node = OmegaConf.create(_checked(preset))
        package = PACKAGE.match(config_text(preset))
        store.store(name=preset.stem, group=group, node=node, package=package[1] if package else None)


def refuse_resolvers(tree: Any) -> None:
    """Raise ConfigError if a value contains a resolver like ${oc.env:NAME}, which could copy a secret into files.

    References to another key, ${another.key}, are allowed. tree: nested mappings of keys.
    """
    for key, value in flat(tree).items():
        if "${" in re.sub(r"\$\{[\w.]+\}", "", str(value)):
            raise ConfigError(f"{key}={value}: only keys are read inside ${{…}}. Write the value itself")


def _beside(recipe: Path | None) -> list[tuple[str, Path]]:
    """Return (group, path) of each YAML file in a folder beside the recipe that has the name of a group.

    The groups experiment and local are left out. The list is empty without a recipe, or for one of configs/.
    """
    if recipe is None or recipe.resolve().is_relative_to(CONFIG_DIR.resolve()):
        return []
    names = sorted(d.name for d in CONFIG_DIR.iterdir() if d.is_dir() and d.name not in ("experiment", "local"))
    return [(name, path) for name in names for path in sorted((recipe.parent / name).glob("*.yaml"))]


def _chosen_beside(recipe: Path, words: Sequence[str]) -> list[tuple[str, Path]]:
    """Return those (group, path) of `_beside` that the recipe or an argument seems to name.

    These are the presets whose file name without suffix is a whole word of the recipe's `defaults:` or of `words`, the
    arguments of the command line. Raises ConfigError as `_checked` does for the recipe.
    """
    wanted = f"{_checked(recipe).get('defaults')} {words}"
    return [(group, path) for group, path in _beside(recipe) if re.search(rf"\b{re.escape(path.stem)}\b", wanted)]


def _checked(path: Path) -> dict[str, Any]:
    """Read a recipe or preset, and return its nested keys, `defaults` included.

    Raises ConfigError for a link out of its folder, a file that is not YAML of keys, ${…} that reads anything but a
    key, and `defaults` that are no list of presets or name a group of Hydra.
    """
    _refuse_link(path)
    tree = read_yaml(path)
    try:
        refuse_resolvers(tree)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if "hydra" in str(tree.get("defaults", "")):
        raise ConfigError(f"{path}: defaults cannot name Hydra's own groups")
    entries = tree.get("defaults", [])
    named = [word for each in entries for word in _named_in(each)] if isinstance(entries, list) else [None]
    if not all(isinstance(word, str) and len(word) <= LONGEST for word in named):
        raise ConfigError(f"{path}: defaults must be a list of presets, each as 'override /model: NAME'")
    return tree


def _named_in(entry: Any) -> list[Any]:
    """Return the keys and values of `entry`, a mapping in `defaults:`, without nulls; for any other entry, [entry]."""
    return [word for pair in entry.items() for word in pair if word is not None] if isinstance(entry, dict) else [entry]


def _refuse_link(path: Path) -> None:
    """Raise ConfigError if `path`, a recipe or preset outside configs/, is a link that leads out of its folder.

    The target of such a link may be private, and error messages would show its keys.
    """
    if CONFIG_DIR not in path.parents and not leads_inside(path, path.parent):
        raise ConfigError(f"{path} is a link that leads out of its folder: copy what it leads to (cp -L)")
