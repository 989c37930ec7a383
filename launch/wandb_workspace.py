"""Save a workspace in a W&B project whose panels are the charts of report.html.

    pip install wandb-workspaces
    python launch/wandb_workspace.py ENTITY PROJECT            # saves it as a new view and prints its address
    python launch/wandb_workspace.py ENTITY PROJECT --print    # prints it as JSON, and asks no server

The charts and the names of their metrics come from the tables of the report. W&B itself adds a panel for each further
metric, table and gallery of a run.
"""

import argparse
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from dyad.data.base.errors import ConfigError
from dyad.eval.report.curves import DERIVED, HEALTH, TRAINING, Plan
from dyad.eval.results.kinds import COMPANIONS, HEADLINES
from dyad.process import run
from dyad.train.tracking.wandb import AXIS

Panels = dict[str, dict[str, Any]]  # title of a panel → fields of a line plot
EVALUATORS = "(val|eval/.+)"  # names of evaluators, as they stand before a metric


def sections() -> dict[str, Panels]:
    """Return title of a section → its panels. The metrics of a panel are named, or matched by a regular expression."""
    return {
        "Evaluation": {
            "Headline metrics": {"metric_regex": _matching(HEADLINES)},
            "Beside them": {"metric_regex": _matching(COMPANIONS)},
        },
        "Training": _panels(TRAINING),
        "Health of the estimator": _panels(HEALTH),
    }


def _matching(metrics: Sequence[str]) -> str:
    """Return a regular expression of metrics of any evaluator. An entry that ends in @ stands for any number behind."""
    names = "|".join(name + r"\d+" if name.endswith("@") else name for name in metrics)
    return f"^{EVALUATORS}/({names})$"


def _panels(plans: Mapping[str, Plan]) -> Panels:
    """Return the panels of planned charts. A metric that a chart computes is replaced by those from which it does."""
    panels: Panels = {}
    for title, plan in plans.items():
        names = [name for line in plan.lines.values() for name in line.split()]
        logged = [source for name in names for source in DERIVED.get(name, (name,))]
        shown = title if logged == names else f"{title}: {', '.join(logged)}"
        panels[shown] = {"y": [f"train/{name}" for name in logged], "log_y": plan.log}
    return panels


def workspace(entity: str, project: str) -> Any:
    """Return the workspace as an object of wandb-workspaces. Raises ConfigError if that package is not installed."""
    try:
        workspaces, reports = map(import_module, ("wandb_workspaces.workspaces", "wandb_workspaces.reports.v2"))
    except ModuleNotFoundError as error:
        raise ConfigError("the package wandb-workspaces is not installed: pip install wandb-workspaces") from error
    shown = [
        workspaces.Section(
            name=name,
            panels=[reports.LinePlot(title=title, x=AXIS, **fields) for title, fields in panels.items()],
            is_open=True,
            pinned=True,
        )
        for name, panels in sections().items()
    ]
    settings = workspaces.WorkspaceSettings(x_axis=AXIS)
    return workspaces.Workspace(
        entity=entity, project=project, name="Dyad", sections=shown, settings=settings, auto_generate_panels=True
    )


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entity", metavar="ENTITY", help="user or team of W&B")
    parser.add_argument("project", metavar="PROJECT", help="its project; tracking.project of the runs")
    parser.add_argument("--print", action="store_true", help="print the workspace as JSON instead of saving it")
    given = parser.parse_args()
    built = workspace(given.entity, given.project)
    if given.print:
        print(built._model.model_dump_json(by_alias=True, exclude_none=True, indent=2))
        return
    try:
        built.save()
    except Exception as error:  # of W&B, of its server, or of the network: they have no base of their own
        raise ConfigError(f"W&B has not saved the workspace in {given.entity}/{given.project}: {error}") from error


if __name__ == "__main__":
    run(main)
