"""Task files (JSON) that entries of eval.suite name. Does not import torch.

They are of zero-shot classification (images, classes and prompts), of probes (training and test part), and of
in-context evaluation (questions and examples). FORMAT below describes the files, also for --help.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyad.data.base.errors import ConfigError, nearest
from dyad.data.base.json_text import read_json

FORMAT = """\
zero_shot:TASK.json names a JSON file with these keys:
  "source"     shards of images, relative to the folder of the file: "pets-{00..03}.tar"
  "label"      the JSON field of a sample that holds its class, or "cls" for the number in its .cls member; numbers are
               places in "classes", from 0
  "templates"  texts with {c} or {} where a prompt goes: ["a photo of a {}", "a drawing of a {}"]
  "classes"    ["cat", "dog"], or prompts for each class: {"cat": ["cat", "kitten"], "dog": []}; []: the name itself
  "others"     "skip": leave samples of other classes out; without this key they are an error
probe:TASK.json names one with three keys; that of zero_shot may have them too, and its "source" is the test part:
  "train", "test"  shards to fit on and to score: .tar of images, or .jsonl of texts in the field "text"; "label"
context_probe:TASK.json has the same keys for contexts of sequences: logs, and the column with the class of a user; or
  .npy files of frames, and the field of the .json beside each file: one class, or a list with that of each frame
in_context:TASK.json names one with "questions": rows with right and wrong answers; "examples": rows of which one stands
  before a question, "{question}{answer}\\n" or as "template" says; "language_model": lm:NAME or a run;
  "length": most tokens of example and question together, where it is not that of the model
"""
KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "source": (str, "a text"),
    "label": (str, "a text"),
    "templates": (list, "a list"),
    "classes": ((dict, list), "a list, or an object of lists"),
}
TEMPLATE = "{question}{answer}\n"  # a row as a prompt
PLACE = re.compile(r"\{c?\}")  # in a template, where a prompt goes


@dataclass(frozen=True)
class ZeroShotTask:
    """The content of a task file of zero-shot classification.

    source: the shards of images. label: the JSON field of a sample that holds its class, or "cls". classes: class name
    → its prompts, already put into the templates. skip_others: whether samples of other classes are left out.
    """

    source: str
    label: str
    classes: Mapping[str, Sequence[str]]
    skip_others: bool = False


def read_task(path: Path) -> ZeroShotTask:
    """Read the task file of zero-shot classification (JSON) at `path`.

    Raises ConfigError if the file cannot be read, if a key is missing or wrong, or if a list of classes has a name
    twice. The files of shards that it names are not checked.
    """
    content = _content(path, "zero_shot", KINDS)
    named, others = content["classes"], content.get("others")
    if others not in (None, "skip"):
        raise ConfigError(f"{path}: 'others' is {others!r:.40}: write \"skip\", or leave the key out")
    classes = named if isinstance(named, dict) else {str(name): [] for name in named}
    if len(classes) < len(named):
        twice = next(name for name, count in Counter(map(str, named)).items() if count > 1)
        hint = f'{{"{twice} (a bird)": ["{twice}"], …}}'
        raise ConfigError(
            f"{path}: 'classes' has '{twice}' twice. Name each class once, with prompts of its own: {hint}"
        )
    source = _beside(path, content["source"])
    return ZeroShotTask(source, content["label"], prompted(classes, content["templates"], path), others == "skip")


def class_names(labels: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the class name of each label: a number as the name with this index in `names`, from 0.

    This holds only if all labels are numbers of at most nine digits and none is in `names`. All other labels, and
    numbers that are too large, are returned unchanged.
    """
    numbers = all(re.fullmatch("[0-9]{1,9}", label) for label in labels) and not set(labels) & set(names)
    return [names[int(label)] if numbers and int(label) < len(names) else label for label in labels]


def read_probe(path: Path, kind: str = "probe") -> tuple[dict[str, str], str]:
    """Read the task file of a probe (JSON) at `path`; return (files of its parts, field that holds the class).

    The files are {"train": files, "test": files}, as text, relative paths resolved against the folder of the task file.
    If the task file has "source" and no "test", "source" is the test part. kind: that of the entry in eval.suite, for
    messages. Raises ConfigError if the file cannot be read, or if a key is missing or wrong.
    """
    content = _content(path, kind, dict.fromkeys(("train", "test", "label"), (str, "a text")))
    return {part: _beside(path, content[part]) for part in ("train", "test")}, content["label"]


@dataclass(frozen=True)
class InContextTask:
    """The content of a task file of in-context evaluation.

    questions, examples: files of rows with questions and answers. language_model: lm:NAME or a run. template: the text
    of an example, with {question} and {answer} in place of those of its row. length: the most tokens of example and
    question together; None: the limit of the language model.
    """

    questions: str
    examples: str
    language_model: str
    template: str = TEMPLATE
    length: int | None = None


def read_in_context(path: Path) -> InContextTask:
    """Read the task file of in-context evaluation (JSON) at `path`.

    Relative paths of questions and examples are resolved against the folder of the file. Raises ConfigError if the file
    cannot be read, or if a key is missing, wrong or unknown.
    """
    names = ("questions", "examples", "language_model")
    content = _content(path, "in_context", dict.fromkeys(names, (str, "a text")))
    legal = (*names, "template", "length")
    if unknown := sorted(set(content) - set(legal)):
        raise ConfigError(f"{path}: unknown key '{unknown[0]}'.{nearest(unknown[0], legal)} Keys: {', '.join(legal)}")
    questions, examples = (_beside(path, content[name]) for name in names[:2])
    length = content.get("length")
    if length is not None and not (isinstance(length, int) and length > 1):
        raise ConfigError(f"{path}: 'length' is {length!r:.40}: write a number of tokens, 2 or more, or leave it out")
    template = str(content.get("template", TEMPLATE))
    check_row_template(template, f"{path}: template")
    return InContextTask(questions, examples, content["language_model"], template, length)


def check_row_template(template: str, key: str) -> None:
    """Raise ConfigError unless `template` has {question} and {answer}.

    key: how the message names the template, such as the name of an option.
    """
    if not all(place in template for place in ("{question}", "{answer}")):
        raise ConfigError(f"{key}={template}: must hold {{question}} and {{answer}}")


def _content(path: Path, name: str, kinds: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """Return the JSON object in the task file at `path`. If it has "source" but no "test", "test" is set to "source".

    name: the kind of the entry in eval.suite, for messages. kinds: required key → (its type, the type in words). Raises
    ConfigError if the file cannot be read, or a key is missing or of another type.
    """
    try:
        content = read_json(path)
    except OSError as error:
        hint = nearest(path.name, [p.name for p in path.parent.glob("*.json")])
        where = f"eval.suite: {name}:{path}"
        raise ConfigError(f"{where}: {error.strerror}.{hint} It must be a JSON task file") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be an object with {', '.join(kinds)}")
    if "source" in content:
        content.setdefault("test", content["source"])
    if faults := [
        f"'{key}' {f'must be {form}' if key in content else 'is missing'}.{nearest(key, set(content) - set(kinds))}"
        for key, (kind, form) in kinds.items()
        if not isinstance(content.get(key), kind)
    ]:
        raise ConfigError(f"{path}: {' '.join(faults)} See: python -m eval --help")
    return content


def _beside(path: Path, shards: str) -> str:
    """Return `shards`, sources joined by "::", with each path resolved against the folder of the task file `path`.

    URLs stay unchanged.
    """
    parts = (part if "://" in part else str(path.parent / os.path.expanduser(part)) for part in shards.split("::"))
    return "::".join(parts)


def distinct_class_names(names: Sequence[str]) -> dict[str, list[str]]:
    """Return class name → [its prompt], from the names of the classes in order; make equal names distinct.

    A name of several classes is the prompt of each of them; their class names are the name with the class index, as
    "crane (517)".
    """
    counts = Counter(names)
    return {name if counts[name] == 1 else f"{name} ({index})": [name] for index, name in enumerate(names)}


def prompted(classes: Mapping[str, list[str]], templates: Sequence[str], path: Path) -> dict[str, list[str]]:
    """Return class name → its texts: each prompt of the class put into each template in place of {c} or {}.

    A class with an empty list of prompts uses its name as the prompt. path: the file that holds the classes or
    templates, for messages. Raises ConfigError for fewer than two classes, or a faulty class or template.
    """
    if len(classes) < 2 or not templates:
        raise ConfigError(f"{path}: needs two classes and one template at least, e.g. 'a photo of {{c}}'")
    for template in templates:
        if not isinstance(template, str) or not PLACE.search(template):
            raise ConfigError(f"{path}: the template {template!r} must hold {{c}} or {{}}, where the class name goes")
    for name, prompts in classes.items():
        if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
            raise ConfigError(f"{path}: the prompts of class '{name}' must be a list of texts ([]: the name itself)")
    return {c: [PLACE.sub(lambda _, p=p: p, t) for p in own or [c] for t in templates] for c, own in classes.items()}
