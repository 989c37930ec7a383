"""Task files of zero-shot classification: pictures, classes and prompts. Does not import torch.

A task file is JSON with these keys:
"source"     the shards of pictures, relative to the folder of the task file
"label"      the JSON field that holds the class of a picture, or "cls"
"templates"  texts with {c} in the place of a prompt, such as ["a photo of {c}"]
"classes"    {class name: [prompts]}; an empty list stands for the class name itself
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dyad.data.base.errors import ConfigError, nearest
from dyad.data.base.json_text import read_json

_KEYS = {"source": str, "label": str, "templates": list, "classes": dict}


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
        raise ConfigError(
            f"eval.suite: zero_shot:{path}: {error.strerror}.{hint} It must be a JSON task file"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be an object with {', '.join(_KEYS)}")
    for key, kind in _KEYS.items():
        if not isinstance(content.get(key), kind):
            raise ConfigError(f"{path}: '{key}' must be a {kind.__name__}.{nearest(key, set(content) - set(_KEYS))}")
    source = content["source"] if "://" in content["source"] else str(path.parent / content["source"])
    return ZeroShotTask(source, content["label"], prompted(content["classes"], content["templates"], path))


def prompted(classes: Mapping[str, list[str]], templates: Sequence[str], path: Path) -> dict[str, list[str]]:
    """Return class name → its texts: each prompt of the class put into each template in place of {c}.

    A class with an empty list of prompts uses its name as the prompt. path: the file that holds the classes or
    templates; a ConfigError for a faulty class or template names it.
    """
    if len(classes) < 2 or not templates:
        raise ConfigError(f"{path}: needs two classes and one template at least, e.g. 'a photo of {{c}}'")
    for template in templates:
        if not isinstance(template, str) or "{c}" not in template:
            raise ConfigError(f"{path}: the template {template!r} must hold {{c}}, where the class name goes")
    for name, prompts in classes.items():
        if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
            raise ConfigError(f"{path}: the prompts of class '{name}' must be a list of texts ([]: the name itself)")
    return {c: [t.replace("{c}", p) for p in prompts or [c] for t in templates] for c, prompts in classes.items()}
