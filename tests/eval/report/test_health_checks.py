"""Each sign of failure is found where it is, not where it is not, and names the key to change."""

from typing import Any

import pytest
from helpers.report import CONFIG, passages, records, retrieval, zero_shot

from dyad.eval.report.curves import History, read_history
from dyad.eval.report.health_checks import CHECKS, health_checks
from dyad.train.run_folder.folder import flat


def config(**changed: Any) -> dict[str, Any]:
    """The configuration with other values of dotted keys, "__" for the dot."""
    new = {name: dict(part) if isinstance(part, dict) else part for name, part in CONFIG.items()}
    for key, value in changed.items():
        section, _, name = key.rpartition("__")
        (new[section] if section else new)[name or key] = value
    return new


def rising(first: float, last: float) -> list[float]:
    return [first + (last - first) * i / 19 for i in range(20)]


def changed(name: str, values: list[float] | list[float | None]) -> list[dict[str, Any]]:
    """The healthy run with another metric of training."""
    lines = records()
    for line, value in zip((line for line in lines if "train/loss" in line), values, strict=True):
        line[f"train/{name}"] = value
    return lines


def scored(values: list[float]) -> list[dict[str, Any]]:
    """The healthy run with other scores of its four evaluations."""
    lines = records()
    for line, value in zip((line for line in lines if "val/image_to_text_R@1" in line), values, strict=True):
        line["val/image_to_text_R@1"] = value
    return lines


def behind(name: str, low: float, high: float) -> dict[str, Any]:
    result = passages()
    result["baselines"] = {name: {"difference": {"nDCG@10": {"value": (low + high) / 2, "interval": [low, high]}}}}
    return result


NO_GAIN = [{**line, "train/accuracy_x": 0.02} for line in changed("loss", [4.1] * 20) if "train/loss" in line]
SOLVED = [*rising(0.2, 0.9)[:17], 1.0, 1.0, 1.0]
LUCK = {
    "metrics": {"acc1": 0.49},
    "chance": {"acc1": 0.5, "majority_class_share": 0.6},
    "intervals": {"acc1": [0.42, 0.56]},
}
PERHAPS = {**LUCK, "metrics": {"acc1": 0.52}, "intervals": {"acc1": [0.45, 0.6]}}
EASY = [{**line, "train/accuracy_y": 1.0} for line in changed("accuracy_x", [*rising(0.2, 0.9)[:17], 1.0, 1.0, 1.0])]


def few(first: float, tenth: float) -> dict[str, Any]:
    """Fifty images and texts, of which these shares are found first and among ten."""
    metrics = {"image_to_text_R@1": first, "image_to_text_R@10": tenth}
    intervals = {name: [value - 0.08, value + 0.08] for name, value in metrics.items()}
    chance = {"image_to_text_R@1": 0.02, "image_to_text_R@10": 0.2}
    return {**retrieval(), "metrics": metrics, "intervals": intervals, "chance": chance}


Given = dict[str, Any]
FOUND: dict[str, tuple[str, str, Given]] = {
    "The loss does not fall": ("fail", "optim.lr", {"records": NO_GAIN}),
    "The loss is that of guessing": ("fail", "optim.lr", {"records": changed("mi_bound", rising(0.01, 0.05))}),
    "Steps were skipped": ("fail", "optim.clip_norm=1", {"records": changed("skipped", [*[0.0] * 10, *[7.0] * 10])}),
    "Samples could not be used": (
        "warn",
        "python -m data check",
        {"records": changed("substituted", [*[0.0] * 10, *[7.0] * 10])},
    ),
    "The temperature is at its clamp": (
        "warn",
        "objective.min_temperature",
        {"records": changed("logit_scale", [*rising(14, 99)[:17], 100.0, 100.0, 100.0])},
    ),
    "The temperature is at its upper clamp": (
        "warn",
        "objective.temperature",
        {"records": changed("logit_scale", [*rising(14, 2)[:17], 1.0, 1.0, 1.0])},
    ),
    "The bound is saturated": ("warn", "global_batch_size", {"records": changed("mi_bound", rising(3, 4.15))}),
    "Embeddings have collapsed": ("fail", "optim.lr", {"records": changed("uniformity_y", rising(-2, -0.01))}),
    "Few negatives count": (
        "warn",
        "objective.temperature",
        {"records": changed("effective_negatives_x", [*rising(30, 5)[:17], 1.2, 1.2, 1.2])},
    ),
    "The batch has become easy": (
        "warn",
        "global_batch_size",
        {"records": EASY, "results": [few(0.8, 0.95)]},
    ),
    "val: learnt by heart": ("fail", "data.augment", {"records": EASY, "results": [few(0.08, 0.38)]}),
    "The warm-up is most of the run": (
        "warn",
        "optim.warmup=0.1",
        {"records": changed("lr", rising(5e-5, 1e-3)), "config": config(optim__warmup=150)},
    ),
    "Duplicates in the batches": (
        "warn",
        "objective.duplicates=mask",
        {"records": changed("duplicates_y", [0.3] * 20)},
    ),
    "Most samples were never visited": (
        "warn",
        "epochs",
        {"records": changed("share_never_visited", rising(1.0, 0.7))},
    ),
    "Running means are stale": ("warn", "objective.gamma", {"records": changed("staleness", rising(0.2, 2.0))}),
    "Waiting for data": ("fail", "data.workers", {"records": changed("data_time", [0.3] * 20)}),
    "Nothing was evaluated": (
        "warn",
        "data.val",
        {"records": [line for line in records() if "train/loss" in line], "results": []},
    ),
    "groups: no better than chance": ("fail", "data.captions", {"results": [{**zero_shot(), **LUCK}]}),
    "groups: not shown to be better than chance": (
        "warn",
        "data to evaluate on",
        {"results": [{**zero_shot(), **PERHAPS}]},
    ),
    "topics: not shown to be ahead of itself before training": (
        "warn",
        "optim.lr",
        {"results": [behind("untrained", -0.009, 0.013)]},
    ),
    "topics: not shown to be ahead of BM25": ("warn", "eval.mine", {"results": [behind("bm25", -0.1, 0.01)]}),
    "topics: behind itself before training": (
        "fail",
        "optim.lr",
        {"results": [behind("untrained", -0.1, -0.01)]},
    ),
    "topics: behind BM25": ("warn", "python -m eval.mine", {"results": [behind("bm25", -0.1, -0.01)]}),
    "val: past its best": ("warn", "steps=100", {"records": scored([0.2, 0.5, 0.4, 0.3])}),
}


def told(given: Given) -> dict[str, Any]:
    found = health_checks(
        flat(given.get("config", CONFIG)),
        read_history(given.get("records", records())),
        given.get("results", [retrieval(), zero_shot(), behind("bm25", 0.01, 0.03)]),
    )
    assert len({sign.topic for sign in found}) == len(found)
    return {sign.topic: sign for sign in found}


def test_a_healthy_run_has_none() -> None:
    found = told({})
    assert {sign.level for sign in found.values()} == {"ok"}
    assert len(found) >= 14


def test_thousands_are_written_out() -> None:
    large = changed("loss", rising(1412.0, 1250.0))
    text = " ".join(str(sign) for sign in told({"records": large}).values())
    assert "Loss 1,40" in text and "1,2" in text and "e+0" not in text


@pytest.mark.parametrize("title", FOUND)
def test_each_is_found_with_the_key_to_change(title: str) -> None:
    level, key, given = FOUND[title]
    sign = told(given)[title]
    assert sign.level == level and key in sign.fix
    assert any(c.isdigit() for c in sign.text) or title == "Nothing was evaluated"
    others = {t for t, s in told(given).items() if s.level != "ok"} - {title}
    assert not others


UNFOUND: dict[str, Given] = {
    "The loss does not fall": {"records": changed("loss", [4.1] * 20)},  # but ever more pairs are told apart
    "The temperature is at its clamp": {
        **FOUND["The temperature is at its clamp"][2],
        "config": config(objective__learnable=False),
    },
    "Waiting for data": {  # 20 steps in half a second, and the start of the loader
        "records": [
            line | {"train/batch_time": 0.025, "train/data_time": 0.02} if "train/loss" in line else line
            for line in records()
        ]
    },
    "Embeddings have collapsed": {**FOUND["Embeddings have collapsed"][2], "config": config(optim__warmup=500)},
    "Duplicates in the batches": {
        **FOUND["Duplicates in the batches"][2],
        "config": config(objective__duplicates="positive"),
    },
    "topics: behind BM25": {"results": [behind("bm25", -0.1, 0.01)]},
    "val: past its best": {"records": scored([0.2, 0.31, 0.3, 0.3])},
}


@pytest.mark.parametrize("title", UNFOUND)
def test_and_not_where_it_does_no_harm(title: str) -> None:
    assert title not in told(UNFOUND[title])


def test_a_small_set_shows_at_ten_what_it_hides_at_one() -> None:
    found = told({"results": [few(0.08, 0.38)]})
    assert found["val: better than chance"].level == "ok" and "R@10 0.380 [0.300, 0.460]" in str(found)
    assert "val: learnt by heart" not in found  # the batch is not easy


def test_what_can_be_of_no_use_is_no_better_than_chance() -> None:
    """As of pairs that were put together wrongly: the intervals hold nothing above chance + 0.05."""
    result = few(0.025, 0.215)
    result["intervals"] = {"image_to_text_R@1": [0.01, 0.04], "image_to_text_R@10": [0.19, 0.24]}
    assert told({"results": [result]})["val: no better than chance"].level == "fail"


def test_a_loss_that_fell_to_that_of_guessing_is_no_good_sign() -> None:
    assert "The loss falls" not in told(FOUND["The loss is that of guessing"][2])


def test_twins_do_no_harm_where_only_a_teacher_is_learned() -> None:
    given = FOUND["Duplicates in the batches"][2]
    for weight, harm in ((0, False), (0.5, True)):
        found = told({**given, "config": config(objective__name="distill_kl", objective__contrastive=weight)})
        assert ("Duplicates in the batches" in found) == harm


def test_who_learns_by_heart_is_not_told_of_a_larger_batch() -> None:
    assert "The batch has become easy" not in told(FOUND["val: learnt by heart"][2])


def test_a_run_that_ends_in_its_warm_up_failed() -> None:
    given = {"records": changed("lr", rising(5e-5, 1e-4)), "config": config(optim__warmup=2000)}
    sign = told(given)["The warm-up is most of the run"]
    assert sign.level == "fail" and "came to 0.0001, optim.lr is 0.001" in sign.text
    assert "The warm-up is most of the run" not in told({**given, "config": config(optim__warmup=0.1)})


def test_a_drop_counts_when_it_is_larger_than_the_noise() -> None:
    """Half the interval of the last score, 0.025 here; without an interval 0.02."""
    for results, noise in (([], 0.02), ([retrieval()], 0.025)):
        for drop in (noise - 0.002, noise + 0.002):
            found = told({"records": scored([0.2, 0.5, 0.4, 0.5 - drop]), "results": results})
            assert ("val: past its best" in found) == (drop > noise)


def test_what_a_plugin_measures_may_be_better_when_lower() -> None:
    """A distance that falls is not past its best, and not behind chance; of tasks of ours any headline rises."""
    history: History = {"eval/a/distance": {1: 0.9, 2: 0.7, 3: 0.5}}
    measured = {"dataset": "a", "task": "distances", "metrics": {"distance": 0.5}, "chance": {"distance": 1.0}}
    for results in ([], [measured]):
        assert not [sign for sign in health_checks({}, history, results) if sign.topic.startswith("a: ")]
    topics = {sign.topic for sign in health_checks({}, history, [{**measured, "task": "rare_class"}])}
    assert {"a: past its best", "a: no better than chance"} <= topics


def test_the_worst_comes_first() -> None:
    given = {"records": changed("duplicates_x", [0.9] * 20), "results": [{**zero_shot(), **LUCK}]}
    levels = [sign.level for sign in told(given).values()]
    assert levels == sorted(levels, key=["fail", "warn", "ok"].index) and levels[:2] == ["fail", "warn"]


def test_runs_that_recorded_little_or_nothing_are_borne() -> None:
    assert set(told({"config": {}, "records": [], "results": []})) == {"Nothing was evaluated"}
    odd: list[dict[str, Any]] = [{"step": 1}, {"step": None, "train/loss": None}, {"train/loss": float("nan")}]
    bare = {"dataset": "x", "task": "zeroshot_retrieval", "metrics": {}, "chance": None, "intervals": None}
    told(
        {"config": {"objective": None}, "records": [*odd, *records()[:2]], "results": [bare, {**bare, "dataset": "y"}]}
    )
    nulls = changed("loss", [None, *rising(4, 2)[1:]])
    assert told({"records": nulls})["Steps were skipped"].level == "warn"


def test_every_check_can_fail() -> None:
    """Each check has its sign in the lists above, or shares one."""
    assert len(FOUND) >= len(CHECKS)
