"""A sweep (-m) of which a run fails: the others are trained, by one process and by several."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.cli import Commands
from helpers.tiny_runs import QUIET

KEYS = {**QUIET, "steps": 6, "optim.warmup": 0, "optim.lr": "1e11,1e-3,2e11", "eval.suite": "[]"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_diverges_does_not_stop_the_others(commands: Commands, tiny, tmp_path: Path, ranks: int) -> None:
    started = commands.started(ranks, "train", *tiny(KEYS)[1:], "-m", coming=None)
    ended = [rank.wait() for rank in started]
    assert [rank.code for rank in ended] == [2] * ranks, ended
    said = "".join(rank.out for rank in ended)
    assert said.count("error: step 4: no finite loss and gradient in 3 steps in a row") == 2, said
    assert said.count("finished at step 6: ") == 1 and said.count("error: ") == 2, said
    assert ended[0].out.endswith("-m: 1 of 3 runs done; failed: optim.lr=1e11; optim.lr=2e11\n")
