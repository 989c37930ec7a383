"""python -m train.export run=runs/x [format=…]: a trained model as a folder that another library loads.

Nothing is called done before that library has loaded the folder and given the same embeddings as the run itself.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import MISSING

from data import errors
from data.command_line import help_text, parse_options
from data.config import described
from data.errors import ConfigError
from train.config import Task

if TYPE_CHECKING:
    from eval.trained import Trained
    from train.exported import Library, Source


class Format(Enum):
    open_clip = "open_clip"
    sentence_transformers = "sentence_transformers"
    dpr = "dpr"


@dataclass
class ExportCommand:
    """`python -m train.export`: which run, for which library."""

    run: str = described(MISSING, "a run folder (its newest checkpoint) or one checkpoint folder")
    format: Format | None = described(
        None, "the library that is to load it; null: open_clip for image_text, else sentence_transformers"
    )
    out: str | None = described(None, "folder to write; null: export/<format> in the run")


PURPOSE = """\
Write a trained model as a folder that open_clip, sentence-transformers or transformers (dpr: two encoders) loads,
checked by loading it there and comparing embeddings. Everything is key=value."""
EXAMPLES = {
    "the newest checkpoint, into the run's own folder": "python -m train.export run=runs/emoji_scratch",
    "one checkpoint, elsewhere": "python -m train.export run=runs/x/checkpoints/step_00001000 out=my_model",
    "two encoders, as DPR has them": "python -m train.export run=runs/topics format=dpr",
}
OWN = {Task.image_text: Format.open_clip, Task.question_passage: Format.sentence_transformers}
CARD = "README.md"
SHOWN = (  # metrics, in the card
    "acc1 image_to_text_R@1 text_to_image_R@1 image_to_text_R@10 text_to_image_R@10 "
    "nDCG@10 MRR@10 Recall@100 accuracy@20 accuracy@100"
).split()


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text(PURPOSE, EXAMPLES, ExportCommand))
        return
    command = parse_options(ExportCommand, sys.argv[1:], "python -m train.export")

    from eval.trained import find_run, load_trained
    from train.exported import Source

    trained = load_trained(*find_run(command.run))
    chosen = command.format or OWN[trained.config.task]
    library: Library = import_module(f"train.export_{chosen.value}").LIBRARY
    out = Path(command.out).expanduser() if command.out else trained.run / "export" / chosen.value
    source = Source(trained.run.resolve().name, trained.config, trained.model, trained.logit_scale)
    difference = export(library, source, out, _facts(trained))
    print(f"{out}: step {trained.step}. {library.name} loaded it and gave the same embeddings (to {difference:.1g}).\n")
    print(library.snippet(out, source))


def export(library: Library, source: Source, out: Path, facts: str = "") -> float:
    """Write `out`; the largest difference between the embeddings of the model and of what the library loads from there.

    facts: what the card says of the training. Raises ConfigError when the library cannot have such a model, or when
    `out` holds files that are not of an export.
    """
    out = out.absolute()
    temporary = out.with_name(f".{out.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        library.write(temporary, source)
        (temporary / CARD).write_text(_card(library, source, facts))
        _refuse_other_files(out, _files(temporary))
        difference = library.difference(temporary, source)
        shutil.rmtree(out, ignore_errors=True)
        os.rename(temporary, out)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return difference


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def _refuse_other_files(out: Path, ours: set[str]) -> None:
    strangers = _files(out) - ours if out.is_dir() else {out.name} if out.exists() else set()
    if strangers:
        raise ConfigError(f"out={out} exists and holds '{min(strangers)}': choose another folder, or remove it")


def _card(library: Library, source: Source, facts: str) -> str:
    """README.md of the folder: what it is, how to load it, what it scored."""
    return f"""\
---
{library.front}
---
# {source.name}

{library.kind} trained by Dyad{facts}
{library.snippet(Path("THIS_FOLDER"), source)}
"""


def _facts(trained: Trained) -> str:
    """How it was trained, and what this very step scored."""
    from eval.results import OTHER_TOOLS

    config = trained.config
    files = [p for p in sorted((trained.run / "eval").glob("*.json")) if not p.stem.endswith(OTHER_TOOLS)]
    scores = [json.loads(path.read_text()) for path in files]
    same = [s for s in scores if s.get("step") == trained.step]
    rows = [f"| {s['dataset']} | {m} | {s['metrics'][m]:.3f} |" for s in same for m in SHOWN if m in s["metrics"]]
    table = "\n".join(["", "| data set | metric | value |", "|---|---|---|", *rows, ""]) if rows else ""
    return (
        f": {trained.step} steps of {config.global_batch_size} pairs, objective {config.objective.name},\n"
        f"data `{config.data.train}`.\n{table}"
    )


if __name__ == "__main__":
    errors.run(main)
