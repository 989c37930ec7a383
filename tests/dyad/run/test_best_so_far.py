"""Which evaluation is the best so far, and what becomes of it when its checkpoint is not there."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.messages import raises
from helpers.rows import write_lines

from dyad.data.base.errors import ConfigError
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.run.best_checkpoint import BestCheckpoint, evaluations_since, rankable_metrics, refuse_unknown_metric
from dyad.run.resume import RestoredState, ResumeSource, best_of_resumed
from dyad.train.cli.also import auxiliary_configs
from dyad.train.cli.compose import compose_config
from dyad.train.config_rules import check_values
from dyad.train.distributed.world import World
from dyad.train.run_folder.best_record import Best
from dyad.train.run_folder.folder import folder_of

RANK, RECALL = "val/mean_rank", "val/R@1"
NAN = float("nan")


@dataclass(frozen=True)
class Ranked(Evaluator):
    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        raise AssertionError("only its metrics are asked for here")

    def higher_is_better(self) -> dict[str, bool]:
        return {"R@1": True, "mean_rank": False}


class Silent(Ranked):
    """Of a plugin that does not say what is better."""

    def higher_is_better(self) -> dict[str, bool]:
        return Evaluator.higher_is_better(self)


def best_of(folder: Path, metric: str | None, found: list[Best] | None = None) -> BestCheckpoint:
    higher = rankable_metrics([Ranked("val", "")]).get(metric or "", True)
    return BestCheckpoint(metric, higher, folder, World(), lambda: None, print, found or [])


def write(folder: Path, step: int) -> None:
    folder_of(folder, step).mkdir(parents=True)


@pytest.mark.parametrize(
    ("metric", "values", "better"),
    [
        (RECALL, [0.1, 0.3, 0.3, 0.2, 0.4], [True, True, False, False, True]),  # of equal ones the earlier stays
        (RANK, [5.0, 7.0, 5.0, 4.0, 4.5], [True, False, False, True, False]),
        (RECALL, [NAN, 0.0, NAN, float("inf"), 0.5], [False, True, False, False, True]),
        (None, [1.0, 2.0], [False, False]),
    ],
)
def test_what_is_better(metric: str | None, values: list[float], better: list[bool], tmp_path: Path) -> None:
    best = best_of(tmp_path, metric)
    for step, (value, expected) in enumerate(zip(values, better, strict=True), 1):
        assert best(step, {metric or RECALL: value, "val/num_images": 99.0}) is expected
        if expected:
            write(tmp_path, step)
    last = max((step for step, is_better in enumerate(better, 1) if is_better), default=None)
    known = best.known(9)
    assert known == (last and Best(metric=metric or "", value=values[last - 1], step=last))
    assert len(best.describe(9)) == (last is not None)


def test_a_best_that_cannot_be_written_does_not_count(tmp_path: Path) -> None:
    """The one before it is the best again, and what is better than that is better."""
    best = best_of(tmp_path, RECALL)
    assert best(1, {RECALL: 0.2})
    write(tmp_path, 1)
    assert best(2, {RECALL: 0.9})
    named = best.known(2)
    assert named and named["step"] == 2  # in its own checkpoint, which is being written
    named = best.known(3)
    assert named and named["step"] == 1  # the disk was full
    assert best(3, {RECALL: 0.5}) and not best_of(tmp_path, RECALL, best.found)(4, {RECALL: 0.1})


def test_a_resumed_run_keeps_the_best_of_its_checkpoint(tmp_path: Path) -> None:
    run, said = tmp_path / "a", list[str]()
    write(run, 4)
    write(run, 6)
    found = Best(metric=RANK, value=3.0, step=4)

    def begins(folder: Path = run, batch_changed: bool = False) -> list[Best]:
        state = RestoredState(6, {"best": found}, batch_changed)
        return best_of_resumed(ResumeSource(folder_of(folder, 6)), state, run, said.append)

    assert begins() == [found] and not said
    assert not best_of(run, RANK, begins())(8, {RANK: 3.0}) and best_of(run, RANK, begins())(8, {RANK: 2.0})
    assert best_of(run, RECALL, begins())(8, {RECALL: 0.1})  # another metric begins anew; until then the old best stays
    kept = best_of(run, None, begins())
    assert not kept(8, {RANK: 1.0}) and kept.known(8) == found
    assert begins(tmp_path / "b") == begins(batch_changed=True) == [] and len(said) == 2
    folder_of(run, 4).rmdir()
    assert begins() == [] and len(said) == 3 and "step 4" in said[2]
    assert best_of_resumed(ResumeSource(), RestoredState(), run, said.append) == [] and len(said) == 3


@pytest.mark.parametrize(
    ("patience", "values", "end"),
    [
        (1, [0.1, 0.3, 0.3], 3),  # an equal one is not better
        (2, [0.1, 0.0, 0.2, 0.1, NAN], 5),
        (2, [NAN, NAN, 0.5], 2),
        (3, [0.1, 0.0, 0.0, 0.2, 0.1, 0.1, 0.1], 7),
        (None, [0.1, 0.0, 0.0, 0.0], None),
        (9, [0.1, 0.0, 0.0, 0.0], None),
    ],
)
def test_when_patience_ends(patience: int | None, values: list[float], end: int | None, tmp_path: Path) -> None:
    """Evaluations are those of steps 1, 2, …; the last is the only one that was announced as perhaps the last."""
    best = best_of(tmp_path, RECALL)
    best.patience = patience
    for step, value in enumerate(values, 1):
        may_end, is_better = best.may_end(step), best(step, {RECALL: value})
        if is_better:
            write(tmp_path, step)
        assert best.patience_is_used_up(step) is (step == end) and not best.patience_is_used_up(step + 1)
        assert may_end or step != end
        if step == end:
            break
    if end is not None and patience is not None:
        said = best.describe_end(end)
        assert f"stopped early at step {end}: {RECALL} was " in said and f"checkpoint.patience={patience}" in said
        assert (f"{patience} evaluation" in said) and ("not finite" in said) is (end == 2)


def test_the_best_of_another_metric_is_not_named_as_that_of_this_one(tmp_path: Path) -> None:
    best = best_of(tmp_path, RECALL)
    assert best(1, {RECALL: 0.5})
    write(tmp_path, 1)
    best = best_of(tmp_path, "val/loss", found=best.found)
    best.patience = 2
    assert not best(2, {"val/loss": NAN}) and not best(3, {"val/loss": NAN})
    assert best.patience_is_used_up(3) and "val/loss was not finite in 2 evaluations" in best.describe_end(3)


def test_the_evaluations_of_a_resumed_run_count(tmp_path: Path) -> None:
    lines = [{"step": n, RECALL: 0.1, RANK: 2.0} for n in (2, 4, 4, 6)] + [{"step": 7, "train/loss": 1.0}]
    lines.append({"step": 8, RECALL: None})
    found = [Best(metric=RECALL, value=0.1, step=2)]
    assert evaluations_since(tmp_path, RECALL, found) == ()
    write_lines(tmp_path / "metrics.jsonl", lines)
    assert evaluations_since(tmp_path, RECALL, found) == (4, 6, 8)
    assert evaluations_since(tmp_path, RECALL, []) == (2, 4, 6, 8)
    assert evaluations_since(tmp_path, RANK, found) == ()  # the next evaluation is the best by this metric


def test_a_metric_that_no_evaluation_ranks_by(tmp_path: Path) -> None:
    evaluators = [Ranked("val", ""), Silent("eval/other", "")]
    for metric in (None, RECALL, RANK):
        refuse_unknown_metric(metric, evaluators)
    with raises(ConfigError, "checkpoint.best=val/R1", "'val/R@1'", f"{RECALL}, {RANK}"):
        refuse_unknown_metric("val/R1", evaluators)
    with raises(ConfigError, "checkpoint.best=eval/other/R@1", "higher_is_better"):
        refuse_unknown_metric("eval/other/R@1", evaluators[1:])
    with raises(ConfigError, f"checkpoint.best={RECALL}", RANK):  # an evaluator that does not keep what it promises
        best_of(tmp_path, RECALL)(1, {RANK: 1.0})


MISTAKES: dict[str, Callable[[], object]] = {
    "data.val": lambda: check_values(compose_config(["checkpoint.best=val/R@1", "eval.every=2"])),
    "eval.every=0": lambda: check_values(compose_config(["checkpoint.best=val/R@1", "data.val=a.tar"])),
}
PATIENCE = ["checkpoint.patience=3", "eval.every=2", "data.val=a.tar"]


@pytest.mark.parametrize("named", MISTAKES)
def test_a_best_of_nothing_is_refused_before_torch_is_loaded(named: str) -> None:
    with raises(ConfigError, "checkpoint.best=val/R@1", named):
        MISTAKES[named]()


def test_checkpoints_that_are_never_written_cannot_stay() -> None:
    with raises(ConfigError, "checkpoint.keep_every=700", "200"):
        check_values(compose_config(["experiment=emoji_scratch", "checkpoint.keep_every=700"]))


def test_patience_without_a_metric_is_refused() -> None:
    with raises(ConfigError, "checkpoint.patience=3", "checkpoint.best=METRIC"):
        check_values(compose_config(PATIENCE))
    with raises(ConfigError, "checkpoint.patience=0"):
        check_values(compose_config([*PATIENCE[1:], "checkpoint.patience=0", "checkpoint.best=val/R@1"]))
    with raises(ConfigError, "eval.every=0"):
        check_values(compose_config([PATIENCE[0], PATIENCE[2], "eval.every=0", "checkpoint.best=val/R@1"]))
    check_values(compose_config([*PATIENCE, "checkpoint.best=val/R@1"]))


def test_auxiliary_losses_do_not_ask_for_evaluations_of_their_own() -> None:
    words = ["data.train=a.tar", "data.val=b.tar", "steps=4", "eval.every=2", "checkpoint.best=val/image_to_text_R@1"]
    words.append("checkpoint.patience=2")
    views = "also.views='task=views data=simclr objective=simclr data.train=a.tar data.val=null'"
    (auxiliary,) = auxiliary_configs(compose_config([*words, views])).values()
    assert auxiliary.checkpoint.best is None and auxiliary.checkpoint.patience is None
