"""Task files of zero-shot classification: pictures, classes and prompts. Does not import torch.

FORMAT below describes the file, also for --help.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dyad.data.base.errors import ConfigError, nearest
from dyad.data.base.json_text import read_json

FORMAT = """\
zero_shot:TASK.json names a JSON file with four keys:
  "source"     shards of pictures, relative to the folder of the file: "pets-{00..03}.tar"
  "label"      the JSON field of a sample that holds its class, or "cls" for the number in its .cls member
  "templates"  texts with {c} or {} where a prompt goes: ["a photo of a {}", "a drawing of a {}"]
  "classes"    ["cat", "dog"], or prompts for each class: {"cat": ["cat", "kitten"], "dog": []}; []: the name itself
"""
KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "source": (str, "a text"),
    "label": (str, "a text"),
    "templates": (list, "a list"),
    "classes": ((dict, list), "a list, or an object of lists"),
}
PLACE = re.compile(r"\{c?\}")  # in a template, where a prompt goes


@dataclass(frozen=True)
class ZeroShotTask:
    """The content of a task file.

    source: the shards of pictures. label: the field that holds the class of a picture. classes: class name → its
    prompts, already put into the templates.
    """

    source: str
    label: str
    classes: Mapping[str, Sequence[str]]


def read_task(path: Path) -> ZeroShotTask:
    """Read the task file of zero-shot classification (JSON) at `path`. Raises ConfigError, with the file and the key,
    if a key is missing or wrong.
    """
    try:
        content = read_json(path)
    except OSError as error:
        hint = nearest(path.name, [p.name for p in path.parent.glob("*.json")])
        where = f"eval.suite: zero_shot:{path}"
        raise ConfigError(f"{where}: {error.strerror}.{hint} It must be a JSON task file") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be an object with {', '.join(KINDS)}")
    spare = set(content) - set(KINDS)
    if faults := [
        f"'{key}' {f'must be {form}' if key in content else 'is missing'}.{nearest(key, spare)}"
        for key, (kind, form) in KINDS.items()
        if not isinstance(content.get(key), kind)
    ]:
        raise ConfigError(f"{path}: {' '.join(faults)} See: python -m eval --help")
    source = content["source"] if "://" in content["source"] else str(path.parent / content["source"])
    named = content["classes"]
    classes = named if isinstance(named, dict) else {str(name): [] for name in named}
    return ZeroShotTask(source, content["label"], prompted(classes, content["templates"], path))


def prompted(classes: Mapping[str, list[str]], templates: Sequence[str], path: Path) -> dict[str, list[str]]:
    """Return class name → its texts: each prompt of the class put into each template in place of {c} or {}.

    A class with an empty list of prompts uses its name as the prompt. path: the file that holds the classes or
    templates; a ConfigError for a faulty class or template names it.
    """
    if len(classes) < 2 or not templates:
        raise ConfigError(f"{path}: needs two classes and one template at least, e.g. 'a photo of {{c}}'")
    for template in templates:
        if not isinstance(template, str) or not PLACE.search(template):
            raise ConfigError(f"{path}: the template {template!r} must hold {{c}} or {{}}, where the class name goes")
    for name, prompts in classes.items():
        if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
            raise ConfigError(f"{path}: the prompts of class '{name}' must be a list of texts ([]: the name itself)")
    return {
        c: [PLACE.sub(lambda _, p=p: p, t) for p in prompts or [c] for t in templates] for c, prompts in classes.items()
    }
