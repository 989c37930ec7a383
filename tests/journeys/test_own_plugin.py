"""A plugin outside the repository adds an objective, a tower, a format and an evaluator, and trains with them."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import ROOT
from helpers.tiny_runs import VAL, losses, records, refused

PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar

from dyad.data.image_text.transforms import ImageSpec
from dyad.data.question_passage.formats import QuestionFormat
from dyad.data.question_passage.passages import Passage
from dyad.eval.encode.encoder import Evaluator, Report
from dyad.evaluation.kinds.images import images
from dyad.plugins import register_evaluator, register_format, register_image_tower, register_objective
from dyad.train.losses.options.common import number
from dyad.train.losses.options.spectral import SpectralFamilyOptions


@dataclass
class AlignmentOptions(SpectralFamilyOptions):
    \"\"\"Alignment of pairs alone.\"\"\"

    formula: ClassVar[str] = "own_formula:Alignment"
    weight: float = number(1.0, "weight of the loss", "above 0")


@dataclass(frozen=True)
class Widths(Evaluator):
    data: object

    def report(self, encode, examples=None):
        return Report("widths", {"width": float(encode("x", self.data.images).shape[1])}, chance={})


def widths(entry, shards, inputs):
    from dyad.data.image_text.items import retrieval_set

    model = inputs.model
    return Widths(entry.name, entry.spec, retrieval_set(shards, model.image, model.tokenize, inputs.config.data))


def pixels(context):
    from torch import nn

    size, width = context.config.image.image_size, context.config.embed_dim
    return nn.Flatten(), nn.Linear(3 * size * size, width), ImageSpec(size, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def texts(fields, name):
    return [Passage(text) for text in fields.get(name) or []]


register_objective("alignment", AlignmentOptions)
register_image_tower("pixels", pixels)
register_evaluator("widths", images(widths))
register_format(QuestionFormat("our logs", "asked", "clicked", "", "ignored", texts))
"""
FORMULA = """
from dyad.train.losses.objectives.base import ObjectiveResult
from dyad.train.losses.objectives.spectral import MomentObjective


class Alignment(MomentObjective):
    def of_pairs(self, x_bD, y_bD, layout):
        share = layout.world_size / layout.total
        return ObjectiveResult(self.options.weight * share * (x_bD - y_bD).square().sum(), {})
"""
KEYS = {
    "objective": "alignment",
    "objective.weight": 0.01,
    "model.image.kind": "pixels",
    "model.image.image_size": 8,
    "eval.suite": f"[widths:{VAL}]",
    "data.workers": 1,
    "steps": 2,
}


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    """The word that names it."""
    (tmp_path / "own_formula.py").write_text(FORMULA)
    (tmp_path / "own.py").write_text(PLUGIN)
    return f"plugins=[{tmp_path / 'own.py'}]"


def without_widths(tiny, **keys: object) -> list[str]:
    return [word for word in tiny({**KEYS, **keys}) if not word.startswith("model.image.widths")]


def test_images_are_trained_and_evaluated_with_it_and_not_without_it(commands, tiny, tmp_path: Path, plugin) -> None:
    words = without_widths(tiny, **{"run.name": "one"})
    run = tmp_path / "runs" / "one"
    trained = commands.run(*words, plugin)
    assert trained.code == 0, trained.out
    assert records(run)[-1]["eval/twemoji-undrawn/width"] == 32
    two = commands.world(2, *without_widths(tiny, **{"run.name": "two"}), plugin)
    assert [rank.code for rank in two] == [0, 0], two[0].out
    assert losses(run.with_name("two")) == pytest.approx(losses(run), rel=1e-5)
    evaluate = ["eval", f"checkpoint={run}"]
    assert commands.run(*evaluate, plugin).code == 0
    refused(commands.run(*evaluate), 2, "'alignment'", plugin)
    refused(commands.run(*words), 2, "objective=alignment", "plugins=[MODULE]")
    assert "already finished" in commands.run(*words, plugin).out
    other = [word for word in words if not word.startswith(("objective", "run.name", "eval.suite"))]
    refused(commands.run(*other), 2, "model.image.kind=pixels")


def test_an_objective_over_the_own_rows_is_stopped_before_the_first_step(
    commands, tiny, tmp_path: Path, plugin
) -> None:
    """It has another loss on every number of ranks. One that means it says so."""
    formula = tmp_path / "own_formula.py"
    formula.write_text(formula.read_text().replace("layout.world_size / layout.total", "1 / len(x_bD) ** 2"))
    two = commands.world(2, *without_widths(tiny), plugin)
    refused(two[0], 2, "objective=alignment", "2 processes", "exact: ClassVar[bool] = False")
    assert two[1].code == 2 and not (tmp_path / "runs").exists()
    own = tmp_path / "own.py"
    own.write_text(own.read_text().replace("    weight: float", "    exact: ClassVar[bool] = False\n    weight: float"))
    words = without_widths(tiny, **{"steps": 1, "eval.suite": "[]", "data.workers": 0})
    assert [rank.code for rank in commands.world(2, *words, plugin)] == [0, 0]


def test_a_launch_script_checks_with_it(tiny, tmp_path: Path, plugin) -> None:
    words = shlex.join([*without_widths(tiny)[1:], plugin])
    check = f"set -euo pipefail; PATH={Path(sys.executable).parent}:$PATH; source launch/job.sh; NPROC=2 dyad_check"
    done = subprocess.run(["bash", "-c", f"{check} {words}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and str(tmp_path / "runs") in done.stdout, done.stderr


def test_questions_of_its_format_are_checked_packed_and_trained_on(commands, models, tmp_path: Path, plugin) -> None:
    rows = [{"asked": f"who is {i}?", "clicked": [f"{i} is one."], "ignored": [f"{i} is two."]} for i in range(40)]
    logs = tmp_path / "logs.jsonl"
    logs.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert "positives       40" in commands.run("data", "check", str(logs), plugin).out
    assert commands.run("data", "pack", str(logs), f"out={tmp_path / 'packed'}", "to=dpr", plugin).code == 0
    words = [
        "experiment=mnrl",
        f"model.text.name={models / 'bert'}",
        "global_batch_size=8",
        "steps=2",
        "data.workers=1",
    ]
    words += ["data.question.length=16", "data.passage.length=16", "tracking=local", "tracking.report=false"]
    words.append(f"run.dir={tmp_path / 'runs'}")
    trained = commands.run("train", *words, f"data.train={logs}", plugin)
    assert trained.code == 0, trained.out
    refused(commands.run("train", *words, f"data.train={logs}", "run.name=b"), 3, "asked, clicked, ignored")
