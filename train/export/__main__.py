"""python -m train.export run=runs/x [format=…]: a trained model as a folder that another library loads.

Nothing is called done before that library has loaded the folder and given the same embeddings as the run itself.
"""

from __future__ import annotations

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

if TYPE_CHECKING:
    from eval.trained import LoadedRun
    from train.export.library import Library, Source
    from train.panels import Scored
    from train.towers.build import Model


CARD = "README.md"


class Format(Enum):
    open_clip = "open_clip"
    sentence_transformers = "sentence_transformers"
    dpr = "dpr"
    onnx = "onnx"


@dataclass
class ExportCommand:
    """`python -m train.export`: which run, for which library."""

    run: str = described(MISSING, "a run folder (its newest checkpoint) or one checkpoint folder")
    format: Format | None = described(
        None, "what is to load it; null: open_clip or sentence_transformers, or onnx for pictures in other towers"
    )
    out: str | None = described(None, "folder to write; null: export/<format> in the run")


PURPOSE = """\
Write a trained model as a folder that open_clip, sentence-transformers, transformers (dpr: two encoders) or
onnxruntime loads, with a model card, checked by loading it there and comparing embeddings. Everything is key=value."""
EXAMPLES = {
    "the newest checkpoint, into the run's own folder": "python -m train.export run=runs/emoji_scratch",
    "one checkpoint, elsewhere": "python -m train.export run=runs/x/checkpoints/step_00001000 out=my_model",
    "two encoders, as DPR has them": "python -m train.export run=runs/topics format=dpr",
    "graphs for onnxruntime, any model": "python -m train.export run=runs/emoji format=onnx",
}


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text(PURPOSE, EXAMPLES, ExportCommand))
        return
    command = parse_options(ExportCommand, sys.argv[1:], "python -m train.export")

    from eval.trained import find_run, load_run
    from train.export.library import Source

    trained = load_run(*find_run(command.run))
    chosen = command.format or _own(trained.model)
    library: Library = import_module(f"train.export.{chosen.value}").LIBRARY
    out = Path(command.out).expanduser() if command.out else trained.run / "export" / chosen.value
    name = trained.run.resolve().name
    source = Source(name, trained.config, trained.model, trained.logit_scale, trained.step, _results(trained))
    difference = export(library, source, out)
    print(f"{out}: step {trained.step}. {library.name} loaded it in a process of its own, without a network,")
    print(f"and gave the same embeddings (to {difference:.1g}). Read its model card, {CARD}, before you hand it on.\n")
    print(library.snippet(out, source))


def export(library: Library, source: Source, out: Path) -> float:
    """Write `out`; the largest difference between the embeddings of the model and of what the library loads from there.

    Raises ConfigError when the library cannot have such a model or cannot load it, or when `out` holds files that are
    not of an export.
    """
    from train.export.card import card
    from train.export.library import difference

    out = out.absolute()
    temporary = out.with_name(f".{out.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        library.write(temporary, source)
        _refuse_other_files(out, {*_files(temporary), CARD})
        distance = difference(library, temporary, source)
        (temporary / CARD).write_text(card(library, source, distance), encoding="utf-8")
        shutil.rmtree(out, ignore_errors=True)
        os.rename(temporary, out)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return distance


def _own(model: Model) -> Format:
    """The format that a model is at home in."""
    from train.towers.build import ImageTextModel

    if not isinstance(model, ImageTextModel):
        return Format.sentence_transformers
    return Format.onnx if model.open_clip_config is None else Format.open_clip


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def _refuse_other_files(out: Path, ours: set[str]) -> None:
    strangers = _files(out) - ours if out.is_dir() else {out.name} if out.exists() else set()
    if strangers:
        raise ConfigError(f"out={out} exists and holds '{min(strangers)}': choose another folder, or remove it")


def _results(trained: LoadedRun) -> list[Scored]:
    """The scores of the evaluations at this step, from the run folder."""
    from eval.panels import scored
    from eval.results import saved_results

    return [scored(result) for result in saved_results(trained.run) if result.get("step") == trained.step]


if __name__ == "__main__":
    errors.run(main)
