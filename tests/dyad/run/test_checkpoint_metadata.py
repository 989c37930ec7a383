"""Entries of a checkpoint's state.json that are of other types, or contradict each other, are refused in one line."""

from pathlib import Path
from typing import Any

import pytest
from helpers.messages import raises

from dyad.data.base.errors import DataError
from dyad.run.resume import check_metadata
from dyad.train.run_folder.checkpoint_state import CheckpointState

METADATA: dict[str, Any] = {
    "seed": 0,
    "global_batch_size": 8,
    "samples_seen": 24,
    "data_fingerprint": "a",
    "data": {},
    "evaluation_owed": False,
    "wandb_id": None,
    "step_state": {"scaler": {}, "skipped": [0, 0], "losses": [1, 0.5]},
    "substituted": {"total": 0, "row": 0, "last": -1, "recent": []},
    "stream": {"first": 2, "through": [3], "taken": [[4, 7]]},
}
STEP, BAD, STREAM = METADATA["step_state"], METADATA["substituted"], METADATA["stream"]
WRONG = {
    "another number of samples than of steps": {"samples_seen": 16},
    "a batch of none": {"global_batch_size": 0, "samples_seen": 0},
    "a huge batch": {"global_batch_size": 10**18, "samples_seen": 3 * 10**18},
    "one count of skipped steps": {"step_state": {**STEP, "skipped": [0]}},
    "losses that are texts": {"step_state": {**STEP, "losses": ["a"]}},
    "a scale of the loss that is a text": {"step_state": {**STEP, "scaler": {"scale": "1"}}},
    "no losses": {"step_state": {"scaler": {}, "skipped": [0, 0]}},
    "updates of the average below none": {"step_state": {**STEP, "averaged": -1}},
    "a bad sample at a text": {"substituted": {**BAD, "recent": ["1"]}},
    "no count of bad samples": {"substituted": {}},
    "a shard without its samples": {"stream": {**STREAM, "taken": [4]}},
    "a shard before the first": {"stream": {**STREAM, "first": -1}},
    "shards that are a number": {"stream": {**STREAM, "through": 3}},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_metadata_of_others(tmp_path: Path, wrong: str) -> None:
    check_metadata(tmp_path, CheckpointState(3, {}, {}, METADATA, {}))
    with raises(DataError, tmp_path, next(iter(WRONG[wrong]))) as error:
        check_metadata(tmp_path, CheckpointState(3, {}, {}, {**METADATA, **WRONG[wrong]}, {}))
    assert "\n" not in str(error.value)
