"""Probes of frozen features against scikit-learn; their task files; images and texts."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.eval import LOCAL, Pixels, Rows, Shown, Words, check_ranking, random_images, tokenize
from helpers.messages import raises
from torch import nn

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.image_text.items import Captions, LabelledSet
from dyad.data.question_passage.text_views import labelled_texts
from dyad.data.shards.shards import open_shards
from dyad.data.shards.sources import parse_sources
from dyad.eval.encode.encoder import Encoder
from dyad.eval.tasks.linear_probe import ROUGH, fit, held_out, linear_probe, logits
from dyad.eval.tasks.probe import Probe
from dyad.eval.tasks.prompts import read_in_context, read_probe
from dyad.train.distributed.world import World
from dyad.train.eval_config import ProbeFeatures
from dyad.train.towers.tower import Tower

EXACT = {"solver": "newton-cholesky", "tol": 1e-12}  # scikit-learn's L-BFGS ends 1e-6 to 1e-5 from the optimum
NAMES = ["ant", "bee", "cat", "dog", "elk", "fox"]


def encoder(seed: int = 0, world: World = LOCAL) -> Encoder:
    torch.manual_seed(seed)
    x, y = Tower(Pixels(width=12), nn.Linear(12, 8)), Tower(Words(width=10), nn.Linear(10, 8))
    return Encoder({"x": x, "y": y}, world, block=16)


def labelled(count: int, classes: int, seed: int) -> LabelledSet:
    """Images whose mean grey says the class, with much noise."""
    rng = np.random.default_rng(seed)
    target = rng.integers(0, classes, count)
    noisy = random_images(count, seed).float() * 0.6 + (12 + 30 / classes) * torch.from_numpy(target).view(-1, 1, 1, 1)
    return LabelledSet(Shown(noisy.to(torch.uint8)), [NAMES[i] for i in target], rng.permutation(count))  # type: ignore[arg-type]


def probe(classes: int = 6, count: int = 150, **more: Any) -> Probe:
    train, test = labelled(count, classes, 1), labelled(100, classes, 2)
    return Probe("eval/animals", "probe:a.json", test, sorted(set(train.labels)), train, "x", **more)


def features(evaluator: Probe, encode: Encoder) -> tuple[np.ndarray, np.ndarray]:
    tower: Any = encode.towers["x"].eval()
    with torch.no_grad():
        train, test = (tower.features(part.items.rows).numpy() for part in (evaluator.train, evaluator.data))  # type: ignore[union-attr]
    return train.astype(np.float64), test.astype(np.float64)


@pytest.mark.parametrize("classes", [2, 3, 6])
def test_every_number_is_scikit_learns(classes: int) -> None:
    linear, near, of = (import_module(f"sklearn.{name}") for name in ("linear_model", "neighbors", "metrics"))
    evaluator, encode = probe(classes, k=7), encoder()
    report = evaluator.report(encode)
    check_ranking(evaluator, report)
    train, test = features(evaluator, encode)
    c = report.details["probe"]["C"]
    model = linear.LogisticRegression(C=c, **EXACT).fit(train, evaluator.train.labels)
    truth, probability = np.array(evaluator.data.labels), model.predict_proba(test)
    assert model.classes_.tolist() == evaluator.classes
    voters = near.KNeighborsClassifier(7, metric="cosine").fit(train, evaluator.train.labels)
    predicted = model.predict(test)
    expected = {
        "linear_acc1": (predicted == truth).mean(),
        "linear_mean_per_class_recall": of.balanced_accuracy_score(truth, predicted),
        "knn_acc1": (voters.predict(test) == truth).mean(),
        "num_samples": 100,
    }
    one_against_others = [truth == name for name in evaluator.classes]
    if classes == 2:
        expected["auc"] = of.roc_auc_score(truth, probability[:, 1])
        expected["partial_auc@0.05"] = of.roc_auc_score(truth, probability[:, 1], max_fpr=0.05)
    else:
        expected["auc"] = of.roc_auc_score(truth, probability, multi_class="ovr", average="macro")
        columns = zip(one_against_others, probability.T, strict=True)
        expected["partial_auc@0.05"] = np.mean([of.roc_auc_score(own, p, max_fpr=0.05) for own, p in columns])
    if classes == 6:
        expected["linear_acc5"] = of.top_k_accuracy_score(truth, probability, k=5)
    weighted = report.metrics.pop("knn_weighted_acc1")
    assert report.metrics == pytest.approx(expected, abs=1e-6)
    assert 1 / classes + 0.1 < expected["linear_acc1"] < 1 and weighted > 1 / classes
    for i, name in enumerate(evaluator.classes):
        own = report.details["per_class"][name]
        assert own["num_samples"] == one_against_others[i].sum()
        assert own["accuracy"] == pytest.approx((predicted == truth)[one_against_others[i]].mean())
        if classes > 2:
            assert own["auc"] == pytest.approx(of.roc_auc_score(one_against_others[i], probability[:, i]), abs=1e-6)
    json.dumps(report.details, allow_nan=False)


@pytest.mark.parametrize(("classes", "c"), [(2, 0.01), (2, 100.0), (5, 1e-4), (5, 1.0), (5, 1e4)])
def test_probabilities_are_scikit_learns(classes: int, c: float) -> None:
    reference = import_module("sklearn.linear_model").LogisticRegression
    rng = np.random.default_rng(0)
    x = rng.normal(3.0, np.linspace(0.5, 2, 20), (300, 20)).astype(np.float32)  # not centred, of several scales
    target = (x[:, :classes] - 3 + rng.gumbel(size=(300, classes))).argmax(axis=1)
    z = logits(x, fit(x, target, c, torch.device("cpu"), 1e-8))
    found = np.exp(z - z.max(axis=1, keepdims=True))
    expected = reference(C=c, **EXACT).fit(x.astype(np.float64), target)
    np.testing.assert_allclose(
        found / found.sum(axis=1, keepdims=True), expected.predict_proba(x.astype(np.float64)), atol=1e-6
    )


def test_a_fifth_of_each_class_is_held_out_whatever_the_order() -> None:
    rng = np.random.default_rng(0)
    target, keys = np.repeat(np.arange(4), 50), rng.integers(-(2**62), 2**62, 200)
    keys[60:70] = keys[50]  # the same content again is on the same side
    out = held_out(target, keys)
    assert [out[target == c].sum() for c in (0, 2, 3)] == [10] * 3 and len(set(out[[50, *range(60, 70)]])) == 1
    order = rng.permutation(200)
    np.testing.assert_array_equal(held_out(target[order], keys[order]), out[order])
    assert held_out(np.array([0, 0, 1]), np.array([3, 2, 1])).tolist() == [True, False, False]
    assert not held_out(np.array([0, 0, 1]), np.array([3, 3, 1])).any()


def test_c_is_the_best_of_its_neighbours_on_the_samples_held_out() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 30)).astype(np.float32)
    target = (x[:, :3] + 2 * rng.gumbel(size=(200, 3))).argmax(axis=1)
    out = np.arange(200) % 5 == 1
    _, c, accuracy = linear_probe(x, target, out, LOCAL)

    def at(exponent: float) -> float:
        weight = fit(x[~out], target[~out], 10**exponent, LOCAL.device, ROUGH)
        return float((logits(x[out], weight).argmax(axis=1) == target[out]).mean())

    steps = 8 * np.log10(c)
    assert steps == pytest.approx(round(steps), abs=1e-9) and abs(steps) <= 48
    assert accuracy == at(np.log10(c)) >= max(at(exponent) for exponent in range(-6, 7, 2))


def test_neighbours_vote_by_their_similarity() -> None:
    """Two near ones of one class against three far ones of the other."""
    angles = torch.tensor([0.0, 0.02, 1.2, 1.25, 1.3])
    rows = torch.stack([angles.cos(), angles.sin()], dim=1)
    train = LabelledSet(Rows(rows), ["near", "near", "far", "far", "far"], np.arange(5))  # type: ignore[arg-type]
    test = LabelledSet(Rows(rows[[0, 4]]), ["near", "far"], np.arange(2))  # type: ignore[arg-type]
    encode = Encoder({"x": Tower(nn.Identity(), nn.Identity())}, LOCAL)
    metrics = Probe("eval/a", "", test, ["far", "near"], train, "x", k=5).report(encode).metrics
    assert metrics["knn_acc1"] == 0.5 and metrics["knn_weighted_acc1"] == 1.0


def test_features_are_before_the_projection_and_maps_are_averaged() -> None:
    encode = replace(encoder(), features=True, cosine=False)
    tower: Any = encode.towers["x"].eval()
    found = encode("x", Rows(random_images(20)))
    with torch.no_grad():
        np.testing.assert_allclose(found, tower.features(random_images(20)).numpy(), rtol=1e-5, atol=1e-6)
    maps = Tower(nn.Identity(), nn.Flatten())
    found = replace(encode, towers={"x": maps})("x", Rows(random_images(20)))
    np.testing.assert_allclose(found, random_images(20).float().mean((2, 3)).numpy(), rtol=1e-6)


def test_the_embeddings_are_probed_on_request() -> None:
    own, other = (probe(features=which).report(encoder()) for which in ProbeFeatures)
    assert own.metrics != other.metrics
    assert [of.details["probe"]["features"] for of in (own, other)] == ["features", "embeddings"]


def test_the_model_before_training_stands_beside_the_trained_one() -> None:
    own, other = (probe().report(encoder(seed), 0) for seed in (0, 1))
    found = replace(probe(), untrained=lambda: encoder(1)).report(encoder(0), 0)
    assert found.metrics == own.metrics and found.details["intervals"] == own.details["intervals"]
    baseline = found.details["baselines"]["untrained"]
    for metric, value in baseline["metrics"].items():
        assert value == pytest.approx(other.metrics[metric])
        low, high = baseline["difference"][metric]["interval"]
        assert low <= baseline["difference"][metric]["value"] <= high
    assert baseline["metrics"].keys() | {"num_samples"} == own.metrics.keys()
    assert baseline["difference"]["auc"]["value"] == pytest.approx(own.metrics["auc"] - other.metrics["auc"])


def test_the_report_has_chance_intervals_confusions_and_cases() -> None:
    report = probe().report(encoder(), 2)
    found = json.loads(json.dumps(report.details, allow_nan=False))
    assert report.task == "linear_probe" and report.files.keys() == {".pictures"}
    for metric, (low, high) in found["intervals"].items():
        assert low <= report.metrics[metric] <= high <= 1 and high - low < 0.4, metric
    assert found["intervals"].keys() | {"num_samples"} == report.metrics.keys()
    share = {"majority_class_share": max(of["num_samples"] for of in found["per_class"].values()) / 100}
    acc1 = dict.fromkeys("linear_acc1 linear_mean_per_class_recall knn_acc1 knn_weighted_acc1".split(), 1 / 6)
    areas = {"auc": 0.5, "partial_auc@0.05": 0.5}
    assert report.chance == pytest.approx({**acc1, **areas, "linear_acc5": 5 / 6, **share})
    counts = np.array(found["confusion"]["counts"])
    assert counts.sum() == 100 and np.trace(counts) / 100 == pytest.approx(report.metrics["linear_acc1"])
    cases = found["gallery"]["picture → classes"]
    assert len(cases) == 6 and cases[0]["value"] == {"rank": 1} and cases[0]["systems"]["model"][0]["right"]


def text_file(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(path: str, read: Callable[..., Any] = labelled_texts) -> LabelledSet:
    return read(open_shards(parse_sources(path)), "about", tokenize)


def test_texts_are_probed(tmp_path: Path) -> None:
    rows = [{"text": f"{'ab'[i % 2] * 3}{i:03}", "about": ["beer", "wine"][i % 2]} for i in range(80)]
    train, test = (texts(text_file(tmp_path / f"{n}.jsonl", rows[n::2] + rows[1 - n :: 2][:9])) for n in (0, 1))
    assert isinstance(train.items, Captions) and train.items.texts[0] == "aaa000" and train.labels[0] == "beer"
    report = Probe("eval/drinks", "", test, ["beer", "wine"], train, "y").report(encoder(), 1)
    assert report.task == "text_linear_probe" and report.files == {} and report.metrics["linear_acc1"] > 0.9
    (case, *_) = report.details["gallery"]["text → classes"]
    assert case["query"]["id"].startswith("row ") and case["query"]["text"] in test.items.texts  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"text": "a"}, "'about'"),
        ({"about": "a"}, "'text'"),
        ({"text": "\ud800", "about": "a"}, "'text'"),
    ],
)
def test_a_wrong_row_is_named(row: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = text_file(tmp_path / "a.jsonl", [{"text": "a", "about": 1}, row])
    with raises(DataError, path, "line 2", named):
        texts(path)


def test_parts_that_cannot_be_probed_are_said() -> None:
    whole = probe()
    one = replace(whole.data, labels=["ant"] * 100)
    same = replace(whole.train, keys=np.zeros(150, np.int64))
    strange = replace(whole.data, labels=["cow"] * 100)
    for change, named in (({"data": one}, ""), ({"train": same}, ""), ({"data": strange}, "'cow'")):
        with raises(DataError, "eval/animals", named):
            replace(whole, **change).report(encoder())


def test_a_task_file_names_both_parts(tmp_path: Path) -> None:
    path = tmp_path / "task.json"
    for content in ({"test": "b.tar"}, {"source": "b.tar", "templates": []}):
        path.write_text(json.dumps({"train": "s3://bucket/a.tar", "label": "group", **content}))
        assert read_probe(path) == ({"train": "s3://bucket/a.tar", "test": str(tmp_path / "b.tar")}, "group")
    path.write_text(json.dumps({"train": "a.tar::~/c.tar", "test": "b.tar", "label": "group"}))
    assert read_probe(path)[0]["train"] == f"{tmp_path}/a.tar::{Path.home()}/c.tar"
    path.write_text(json.dumps({"trian": "a.tar", "test": 3}))
    with raises(ConfigError, path, "'train'", "'trian'", "'test'", "'label'"):
        read_probe(path)
    with raises(ConfigError, "eval.suite", "none.json"):
        read_probe(tmp_path / "none.json")
    task = {"questions": "a.jsonl", "examples": "b.jsonl", "language_model": "lm:x"}
    path.write_text(json.dumps({**task, "lenght": 64}))
    with raises(ConfigError, path, "'lenght'", "'length'"):
        read_in_context(path)
