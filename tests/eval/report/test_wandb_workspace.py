"""launch/wandb_workspace.py: its panels are of metrics that runs log, and it prints a workspace without a server."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from dyad.eval.report.curves import CHARTED

SCRIPT = Path(__file__).parents[3] / "launch/wandb_workspace.py"


def test_panels_are_of_logged_metrics() -> None:
    sections = runpy.run_path(str(SCRIPT))["sections"]()
    first, second = (re.compile(panel["metric_regex"]) for panel in sections["Evaluation"].values())
    assert all(map(first.search, ("val/image_to_text_R@10", "eval/groups/acc1", "eval/a/b/nDCG@10")))
    assert second.search("val/text_to_image_R@1") and second.search("eval/ids/MRR")
    assert not any(map(first.search, ("train/acc1", "val/acc1_low", "eval/image_to_text_R@", "valid/acc1")))
    named = [name for of in ("Training", "Health of the estimator") for p in sections[of].values() for name in p["y"]]
    assert all(name.removeprefix("train/").startswith(tuple(CHARTED)) for name in named)
    assert {"train/loss", "train/logit_scale", "train/data_time", "train/tau_p10"} <= {*named}
    assert not {"train/temperature", "train/waiting_percent"} & {*named}  # computed by the report, never logged
    assert sections["Training"]["Waiting for data: data_time, batch_time"]["log_y"] is False


@pytest.mark.workspaces
def test_a_workspace_is_printed_without_a_server() -> None:
    command = [sys.executable, str(SCRIPT), "me", "mine", "--print"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    )
    view = json.loads(done.stdout)
    assert (view["entity"], view["project"], view["displayName"]) == ("me", "mine", "Dyad")
    found = view["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in found] == ["Evaluation", "Training", "Health of the estimator"]
    loss = found[1]["panels"][0]["config"]
    assert (loss["xAxis"], loss["metrics"]) == ("trainer/global_step", ["train/loss"])
