"""Writes the pages of docs/reference/ from the code: commands, keys, objectives, Python API, messages, files.

    python -m docs.write_reference     after a change of a key, an option, a docstring or a message

The pages are plain Markdown. `tests/layout/test_documents.py` fails while one of them differs from the code.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache
from importlib import import_module
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any, get_args, get_type_hints

import dyad
from dyad.__main__ import COMMANDS
from dyad.data.cli.main import VERBS
from dyad.eval.report.curves import DERIVED, HEALTH, TRAINING
from dyad.eval.report.health_checks import CHECKS
from dyad.train.arguments import as_argument
from dyad.train.cli.compose import keys
from dyad.train.cli.presets import CONFIG_DIR, groups
from dyad.train.losses import OBJECTIVES
from dyad.train.run_folder.folder import read_yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/reference"
NOTE = "This page is made from the code by `python -m docs.write_reference`.\n"
OTHER_METRICS = {  # of every run, without a chart of their own
    "skipped": "Share of the steps since the last line whose loss or gradient was not finite; they changed nothing.",
    "duplicates_x duplicates_y": "Share of the batch whose item stands in it more than once.",
    "substituted": "Samples that could not be read and were replaced, since the start.",
    "batch_time": "Seconds of a step; data_time: of these, waiting for data.",
    "samples_per_second_per_device": "Pairs a second of one device.",
    "checkpoint_seconds": "Seconds that the steps since the last line waited for saving.",
    "mfu": "Model FLOPs utilisation: speed of the towers as a share of the GPU's peak, where that is known.",
    "copy_time": "On a GPU: seconds that the copies of a batch took.",
    "mi_saturated": "1 where mi_bound is near log K, and says little.",
    "alignment": "Mean squared distance of the normalised embeddings of a pair.",
    "log_z_x log_z_std_x log_z_y log_z_std_y": "Log mean exp of an anchor's logits: mean, deviation.",
    "participation_x participation_y": "1 / Σπ², π as for effective negatives: another count of them.",
    "log_k": "log K, with K the candidates of an anchor: the loss of a guess, in nats.",
}
PACKAGES = ("data", "train", "eval", "dyad")
AREAS = {  # of the messages: title → what the folders of tests that meet them begin with; the first title counts
    "Data": r"data/",
    "Models": r"train/towers",
    "Objectives": r"train/losses",
    "Steps, devices and processes": r"faults/|train/(step|distributed|monitor)|\w+/plan",
    "Evaluation, mining and the report": r"eval/|dyad/evaluation",
    "Export and translation of command lines": r"\w+/(export|doctor)",
    "Configuration, start and resume": r"train/|dyad/|journeys/",
}


def cell(text: Any) -> str:
    """Return a text for a cell of a Markdown table: on one line, with | and < escaped."""
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|").replace("<", "&lt;").strip()


def table(head: tuple[str, ...], rows: Iterator[tuple[Any, ...]] | list[tuple[Any, ...]]) -> str:
    """Return a Markdown table, which ends with a line break. head: its titles. rows: as many values each."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines) + "\n"


def fenced(text: str, kind: str = "text") -> str:
    """Return a text as a fenced Markdown block. kind: the language of the block."""
    return f"```{kind}\n{text.rstrip()}\n```\n"


def commands_page() -> str:
    """Return the page of all commands: what each prints for --help."""
    asked = [[name] for name in COMMANDS] + [["data", verb.name] for verb in VERBS]
    parts = [f"# Commands\n\n{NOTE}\nInstalled by pip, `python -m train` is also `dyad train`, and so on.\n"]
    for words in asked:
        parts.append(f"## dyad {' '.join(words)}\n\n{fenced(help_of(words))}")
    return "\n".join(parts)


def help_of(words: list[str]) -> str:
    """Return what a command prints for --help. words: its name, and the verb of `data`.

    The command runs in this process, with sys.argv set for the time.
    """
    out, arguments = StringIO(), sys.argv
    sys.argv = [f"dyad {words[0]}", *words[1:], "--help"]
    try:
        with redirect_stdout(out), suppress(SystemExit):
            import_module(COMMANDS[words[0]][0]).main()
    finally:
        sys.argv = arguments
    return out.getvalue()


def keys_page() -> str:
    """Return the page of the keys of `python -m train`, but for those of objectives."""
    sections: dict[str, list[tuple[str, str, str]]] = {}
    for key, default, meaning in keys():
        section = key.partition(".")[0] if "." in key else "Keys without a section"
        if section != "objective":
            sections.setdefault(section, []).append((f"`{key}`", f"`{as_argument(default)}`", meaning))
    chosen = default_choices()
    choices = [
        (f"`{name}`", f"`{chosen.get(name) or 'null'}`", ", ".join(f"`{c}`" for c in found))
        for name, found in groups().items()
    ]
    parts = [f"# Keys\n\n{NOTE}", "Every key is typed as `key=value` after `python -m train`.\n"]
    parts += ["## Groups\n", "A group has presets in `configs/`; `group=choice` takes one.\n"]
    parts.append(table(("group", "default", "choices"), choices))
    for section, rows in sections.items():
        parts += [f"## {section}\n", table(("key", "default", "meaning"), rows)]
    return "\n".join(parts)


def default_choices() -> dict[str, str | None]:
    """Return the choice of each group that a run has without arguments, from configs/train.yaml."""
    defaults = read_yaml(CONFIG_DIR / "train.yaml")["defaults"]
    return {group: choice for entry in defaults if isinstance(entry, dict) for group, choice in entry.items()}


def objectives_page() -> str:
    """Return the page of all objectives: summary, class with the formula, arguments, options."""
    parts = [f"# Options of the objectives\n\n{NOTE}", "[Choosing an objective](../objectives.md) has the formulas.\n"]
    for name, options in OBJECTIVES.items():
        summary = (options.__doc__ or "").splitlines()[0]
        takes = ", ".join(f"`{argument}`" for argument in sorted(options.takes)) or "none"
        parts.append(f"## {name}\n\n{summary}\n\nInputs: {options.inputs}. Arguments beside them: {takes}.\n")
        parts.append(fenced(doc_of(formula_of(options.formula))))
        parts.append(table(("option", "default", "meaning"), list(option_rows(options))))
    return "\n".join(parts)


def formula_of(formula: Any) -> type:
    """Return the class with a formula. formula: "module:Class", a module below dyad/train/losses/objectives."""
    module, _, name = str(formula).partition(":")
    return getattr(import_module(f"dyad.train.losses.objectives.{module}"), name)


def option_rows(options: type) -> Iterator[tuple[str, str, str]]:
    """Yield option, default and meaning with the legal choices, for each option of an objective."""
    hints = get_type_hints(options)
    for option in fields(options):
        if option.name == "name":
            continue
        kinds = [kind for kind in (hints[option.name], *get_args(hints[option.name])) if isinstance(kind, type)]
        named = [", ".join(each.name for each in kind) for kind in kinds if issubclass(kind, Enum)]
        legal = f" ({'; '.join(named) or option.metadata.get('range', '')})".replace(" ()", "")
        default = option.default if option.default_factory is MISSING else option.default_factory()
        yield f"`{option.name}`", f"`{as_argument(default)}`", option.metadata.get("help", "") + legal


def api_page() -> str:
    """Return the page of the public Python names."""
    parts = [f"# Python API\n\n{NOTE}", fenced(doc_of(dyad))]
    for name in sorted(dyad.__all__):
        found = getattr(dyad, name)
        parts += [f"## dyad.{name}\n", *described(name, found)]
        for method, value in vars(found).items() if inspect.isclass(found) else ():
            function = getattr(value, "__func__", value)  # of a class method
            if inspect.isfunction(function) and not method.startswith("_"):
                parts += [f"### {name}.{method}\n", *described(method, function)]
    return "\n".join(parts)


def described(name: str, value: Any) -> Iterator[str]:
    """Yield Markdown for a public name: the signature of a function, then the docstring.

    Of a dictionary, the table of objectives, its keys are listed.
    """
    if inspect.isfunction(value):
        node = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
        assert isinstance(node, ast.FunctionDef)
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        yield fenced(f"{name}({ast.unparse(node.args)}){result}")
    if isinstance(value, dict):
        yield "The options class of each objective, by its name: " + ", ".join(f"`{key}`" for key in value) + ".\n"
    elif documented := doc_of(value):
        yield fenced(documented)


def doc_of(value: Any) -> str:
    """Return the docstring of a module, class or function, without indentation; "" if there is none."""
    return inspect.getdoc(value) or ""


def messages_page() -> str:
    """Return the page of the messages in tests/messages.txt, by area. “…” stands for a name, a path or a number.

    Messages of five words or fewer are left out.
    """
    text = (ROOT / "tests/messages.txt").read_text()
    met = re.findall(r"^(\S+)::\S+\n((?:    .*\n)+)", text, re.MULTILINE)
    parts = [f"# Messages\n\n{NOTE}", "“…” stands for a name, a path or a number. Search this page for words.\n"]
    parts.append("[Troubleshooting](../troubleshooting.md) explains those that people meet most.\n")
    area_of = {place: next((a for a, start in AREAS.items() if re.match(start, place)), "") for place, _ in met}
    for title in AREAS:
        lines = [line[4:] for place, block in met if area_of[place] == title for line in block.splitlines()]
        alike = {re.sub(r"\d[\d.,]*\b|'[^']*'", "…", line).replace("\\n", " ") for line in lines}
        told = sorted(line for line in alike if len(re.findall(r"[A-Za-z]{2,}", line)) > 5)
        parts += [f"## {title}\n", fenced("\n".join(told))]
    return "\n".join(parts)


def signs_page() -> str:
    """Return the page of the signs of failure that a report looks for."""
    parts = [
        f"# Signs of failure\n\n{NOTE}",
        "The [report](../report.md) of a run shows them. “…” stands for a number or a name.\n",
    ]
    for condition, check in CHECKS.items():
        title = _said(check.title)
        told = [
            f"## {title[0].upper()}{title[1:]}\n",
            f"{_said(check.text)}.\n",
            f"- What to change: {_said(check.fix)}.",
        ]
        told.append(f"- Shown where `{condition}`." + ("" if check.fails_above == inf else " It can be a problem (✕)."))
        parts.append("\n".join([*told, f"- Otherwise: ✓ {_said(check.fine[0])}.\n" if check.fine else ""]))
    return "\n".join(parts)


def _said(template: str) -> str:
    """Return the text of a sign of failure, with “…” in place of each {…}, without a full stop."""
    return cell(re.sub(r"\{[^}]*}", "…", template)).removeprefix("…: ").removesuffix(".")


def metrics_page() -> str:
    """Return the page of the numbers of a training run, by the charts of the report that show them."""
    parts = [
        f"# Numbers of a run\n\n{NOTE}",
        "In `metrics.jsonl`, W&B and TensorBoard “train/” stands before a name, and numbers of evaluations are "
        "“eval/DATA/METRIC”. A run has those that its objective, device and task make. x and y are the two sides of a "
        "pair, such as images and texts.\n",
    ]
    rows = []
    for title, plan in (TRAINING | HEALTH).items():
        made = [DERIVED.get(name, (name,)) for names in plan.lines.values() for name in names.split()]
        rows.append((title, ", ".join(f"`{name}`" for names in made for name in names), plan.note))
    rows += [("", ", ".join(f"`{name}`" for name in names.split()), said) for names, said in OTHER_METRICS.items()]
    parts.append(table(("chart of the report", "names", "meaning"), rows))
    return "\n".join(parts)


def files_page() -> str:
    """Return the page of all modules but __main__, by folder, each with the first paragraph of its docstring."""
    parts = [
        f"# Files\n\n{NOTE}",
        "Every module of Dyad with the first paragraph of its docstring. Search this page.\n",
    ]
    for folder in sorted(path.parent for top in PACKAGES for path in (ROOT / top).rglob("__init__.py")):
        parts.append(f"## {folder.relative_to(ROOT)}/\n\n{_said_by(folder / '__init__.py')}\n")
        modules = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("__")]
        if modules:
            parts.append(table(("file", "content"), [(f"`{path.name}`", _said_by(path)) for path in modules]))
    return "\n".join(parts)


def _said_by(path: Path) -> str:
    """Return the first paragraph of the docstring of a file as a cell of a table; "" without a docstring."""
    return cell((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0])


PAGES: dict[str, Callable[[], str]] = {
    "commands": commands_page,
    "keys": keys_page,
    "objectives": objectives_page,
    "api": api_page,
    "messages": messages_page,
    "signs": signs_page,
    "metrics": metrics_page,
    "files": files_page,
}


@cache
def pages() -> dict[Path, str]:
    """Return path → text for each page. They are made once per process, and not written."""
    return {FOLDER / f"{name}.md": make() for name, make in PAGES.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
        print(path.relative_to(ROOT), len(text.split()), "words")
