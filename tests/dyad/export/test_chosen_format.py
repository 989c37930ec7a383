"""The format of an export: the default of a model, and formats that do not take its task."""

from typing import Any, cast

import pytest
from helpers.messages import raises

from dyad.data.base.errors import ConfigError
from dyad.export.main import ExportFormat, chosen_format
from dyad.train.config import Task, TrainConfig

NO_MODEL = cast(Any, None)  # the task decides alone


@pytest.mark.parametrize(("task", "only"), [(Task.sequence, "torch"), (Task.language_model, "causal_lm")])
def test_a_task_with_one_format_refuses_the_others(task: Task, only: str) -> None:
    config = TrainConfig(task=task)
    assert chosen_format(None, config, NO_MODEL) is chosen_format(ExportFormat[only], config, NO_MODEL)
    for asked in ExportFormat:
        if asked.name != only:
            with raises(ConfigError, f"format={asked.name}", f"task={task.value}", f"format={only}"):
                chosen_format(asked, config, NO_MODEL)
