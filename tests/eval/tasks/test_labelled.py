"""Evaluators of task=labelled against scikit-learn."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from helpers.eval import LOCAL, Pixels, Shown, check_ranking, random_images
from helpers.messages import raises
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import DataConfig, ItemKind
from dyad.data.image_text.items import LabelledSet
from dyad.data.loading.class_batches import ClassNumbers
from dyad.eval.encode.encoder import Encoder
from dyad.eval.tasks.classification import class_indices
from dyad.eval.tasks.labelled import RareClass, TrainedClasses
from dyad.evaluation.suite import check_suite
from dyad.train.config import Task, TrainConfig
from dyad.train.eval_config import EvalConfig

NAMES = ["ant", "bee", "cat", "dog", "elk", "fox"]


def labelled(count: int = 90) -> LabelledSet:
    rng = np.random.default_rng(0)
    labels = [NAMES[i] for i in rng.choice(6, count, p=[0.3, 0.1, 0.2, 0.2, 0.1, 0.1])]
    return LabelledSet(Shown(random_images(count)), labels, np.arange(count))  # type: ignore[arg-type]


def encoder(width: int, seed: int = 0, cosine: bool = False) -> Encoder:
    torch.manual_seed(seed)
    vectors = nn.Embedding(6, width)
    nn.init.normal_(vectors.weight, mean=2.5, std=3.0)
    return Encoder({"x": Pixels(width=width), "y": vectors}, LOCAL, block=16, cosine=cosine)


@pytest.mark.parametrize("cosine", [False, True])
def test_accuracies_of_inner_products_with_the_class_vectors(cosine: bool) -> None:
    """Vectors of other lengths than 1 count as they are where training has it so."""
    data, encode = labelled(), encoder(8, cosine=cosine)
    evaluator = TrainedClasses("val", "a.tar", data, {name: [name] for name in NAMES}, ClassNumbers(NAMES))
    report = evaluator.report(encode, examples=1)
    check_ranking(evaluator, report)
    with torch.no_grad():
        x: Tensor = encode.towers["x"].eval()(data.items.rows)  # type: ignore[union-attr]
        y = encode.towers["y"](torch.arange(6))
        x, y = (nn.functional.normalize(e, dim=1) if cosine else e for e in (x, y))
    scores, target = (x @ y.T).numpy(), np.array([NAMES.index(label) for label in data.labels])
    of = import_module("sklearn.metrics")
    want = {
        "acc1": of.accuracy_score(target, scores.argmax(1)),
        "acc5": of.top_k_accuracy_score(target, scores, k=5),
        "mean_per_class_recall": of.balanced_accuracy_score(target, scores.argmax(1)),
        "num_samples": 90.0,
    }
    assert report.metrics == pytest.approx(want) and report.task == "classification"
    np.testing.assert_array_equal(report.details["confusion"]["counts"], of.confusion_matrix(target, scores.argmax(1)))


@pytest.mark.parametrize("max_fpr", [0.05, 0.3, 1.0])
def test_areas_of_a_rare_class(max_fpr: float) -> None:
    data, encode = labelled(), encoder(1)
    evaluator = RareClass("val", "a.tar", data, "bee", max_fpr)
    report = evaluator.report(encode)
    check_ranking(evaluator, report)
    with torch.no_grad():
        score = encode.towers["x"].eval()(data.items.rows)[:, 0].numpy()  # type: ignore[union-attr]
    positive, area = np.array(data.labels) == "bee", import_module("sklearn.metrics").roc_auc_score
    assert report.metrics["auc"] == pytest.approx(area(positive, score), abs=1e-9)
    want = area(positive, score, max_fpr=max_fpr)
    assert report.metrics[f"partial_auc@{max_fpr:g}"] == pytest.approx(want, abs=1e-9)
    assert report.metrics["num_rare"] == positive.sum()
    low, high = report.details["intervals"]["auc"]
    assert low < report.metrics["auc"] < high


def test_a_class_that_no_sample_has() -> None:
    with raises(DataError, "'bees'", "'bee'"):
        RareClass("val", "a.tar", labelled(), "bees", 0.1)


def test_labels_and_classes_may_have_different_forms_of_unicode() -> None:
    """A Mac writes ü in the names of folders as two characters."""
    one, two = "gr\u00fcn", "gru\u0308n"
    assert class_indices([one, two, "rot"], ["rot", two], "val").tolist() == [1, 1, 0]
    rare = RareClass("val", "a.tar", replace(labelled(3), labels=[one, two, "rot"]), two, 0.1)
    assert rare.positive.tolist() == [True, True, False]


def test_a_label_that_is_no_class_is_found_before_training() -> None:
    with raises(DataError, "90 samples"):
        TrainedClasses("val", "a.tar", labelled(), {name: [name] for name in NAMES[1:]}, ClassNumbers(NAMES[1:]))


@pytest.mark.parametrize("items", [ItemKind.pictures, ItemKind.texts])
def test_the_files_of_labelled_samples_are_named_by_their_entry(items: ItemKind) -> None:
    config = TrainConfig(Task.labelled, data=DataConfig(items=items), eval=EvalConfig(suite=["classes:nope.jsonl"]))
    with raises(ConfigError, "eval.suite: classes=nope.jsonl"):
        check_suite(config)
