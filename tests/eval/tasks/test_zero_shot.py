"""Zero-shot classification against CLIP_benchmark and scikit-learn; task files and CLIP_benchmark folders."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.eval import LOCAL, Rows, check_ranking, encoder, random_images, tokenize, towers
from helpers.messages import raises
from helpers.shards import image, write_tar
from torch.utils.data import DataLoader, TensorDataset

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.config import DataConfig
from dyad.data.image_text.items import Images, LabelledSet, labelled_set
from dyad.data.image_text.transforms import ImageSpec
from dyad.data.shards.shards import open_shards
from dyad.data.shards.sources import ShardSource
from dyad.eval.encode.encoder import Report
from dyad.eval.metrics.matches import Labels, Matches
from dyad.eval.results.cases import item
from dyad.eval.tasks import prompts
from dyad.eval.tasks.classification import accuracies, confusion, predictions
from dyad.eval.tasks.direction import Direction
from dyad.eval.tasks.prompts import FORMAT, ZeroShotTask, class_names, prompted, read_task
from dyad.eval.tasks.wds import read_wds
from dyad.eval.tasks.zero_shot import ZeroShot, keep_known_classes

CLASSES = {
    "cat": ["a cat", "one cat"],
    "dog": ["a dog"],
    "owl": ["an owl", "owls", "owl"],
    "fox": ["fox"],
    "bee": ["bee", "bees"],
    "elk": ["elk"],
}


def evaluator(count: int = 60, classes=CLASSES, **labelled: object) -> ZeroShot:
    names = list(classes)
    labels = [names[i * i % (len(names) - 1)] for i in range(count)]  # the last class has no image
    data = LabelledSet(**{"items": Rows(random_images(count)), "labels": labels, "keys": np.arange(count), **labelled})  # type: ignore[arg-type]
    return ZeroShot("eval/animals", "zero_shot:animals.json", data, classes, tokenize)


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_metrics_equal_those_of_clip_benchmark(monkeypatch) -> None:
    reference = import_module("clip_benchmark.metrics.zeroshot_classification")

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = towers(3)
            self.encode_image, self.encode_text = parts["x"], parts["y"]

    model = Both().eval()
    names, labels = list(CLASSES), evaluator().data.labels
    target = torch.tensor([names.index(label) for label in labels])

    data = TensorDataset(random_images(60), target)
    data.classes = names  # type: ignore[attr-defined]
    batches = DataLoader(data, batch_size=16)
    # numpy 2.5 no longer turns arrays of one element into floats, which CLIP_benchmark 1.6 does
    monkeypatch.setattr(reference, "float", lambda value: getattr(value, "item", lambda: float(value))(), raising=False)
    expected = reference.evaluate(model, batches, tokenize, names, CLASSES, "cpu", amp=False)
    report = evaluator().report(encoder(3))
    assert {k: report.metrics[k] for k in expected} == pytest.approx(expected, abs=1e-9)
    assert 0 < expected["acc1"] < expected["acc5"] < 1
    assert report.metrics["num_samples"] == 60


def test_an_index_serves_the_accuracies_and_is_named() -> None:
    exact = evaluator().report(encoder(3), 0)
    check_ranking(evaluator(), exact)
    whole, part = (replace(evaluator(), index=index).report(encoder(3), 0) for index in ("IVF1,Flat", "IVF3,Flat"))
    assert whole.metrics == {**exact.metrics, "recall_against_exact@5": 1.0} and "search" not in exact.details
    assert whole.details["confusion"] == exact.details["confusion"]
    assert whole.details["search"] == {"index": "IVF1,Flat"}
    assert part.metrics["recall_against_exact@5"] < 1 and part.metrics["acc5"] < exact.metrics["acc5"]
    assert np.sum(part.details["confusion"]["counts"]) == 60


def test_a_class_that_an_index_does_not_find_is_no_hit() -> None:
    five = {name: CLASSES[name] for name in list(CLASSES)[:5]}
    report = replace(evaluator(classes=five), index="IVF4,Flat").report(encoder(3))
    check_ranking(replace(evaluator(classes=five), index="IVF4,Flat"), report)
    assert report.metrics["recall_against_exact@5"] < 1 and report.metrics["acc5"] < 1


def test_classes_too_few_for_an_index_are_ranked_exactly() -> None:
    exact, few = (replace(evaluator(), index=i).report(encoder(3), 0) for i in ("Flat", "IVF256,Flat;nprobe=16"))
    assert few.metrics == exact.metrics and few.details["confusion"] == exact.details["confusion"]
    assert few.details["search"]["index"] == "Flat" and "(256)" in few.details["search"]["because"]


def test_chance_and_classes_are_reported() -> None:
    report = evaluator().report(encoder())
    assert report.chance == pytest.approx(
        {"acc1": 1 / 6, "acc5": 5 / 6, "mean_per_class_recall": 1 / 6, "majority_class_share": 24 / 60}, abs=0.07
    )
    share = [c["num_samples"] for c in report.details["per_class"].values()]
    assert sum(share) == 60 and max(share) / 60 == report.chance["majority_class_share"]
    assert report.details["per_class"]["elk"] == {"num_samples": 0, "accuracy": None}
    right = sum(c["num_samples"] * (c["accuracy"] or 0) for c in report.details["per_class"].values())
    assert right / 60 == pytest.approx(report.metrics["acc1"])
    json.dumps(report.details, allow_nan=False)


def test_recall_per_class_is_scikit_learns() -> None:
    sklearn = import_module("sklearn.metrics")
    rng = np.random.default_rng(0)
    target, predicted = rng.integers(0, 4, 200), rng.integers(0, 6, 200)
    rank = np.where(predicted == target, 1, 2 + rng.integers(0, 4, 200))
    found = {metric: values.mean() for metric, values in accuracies(rank, target, 6).items()}
    confusion = sklearn.confusion_matrix(target, predicted)[:4]
    assert found["mean_per_class_recall"] == pytest.approx(np.mean(np.diag(confusion) / confusion.sum(axis=1)))
    assert found["acc5"] == (rank <= 5).mean()
    assert "acc5" not in accuracies(rank, target, 4)


def shown(report: Report) -> dict[str, Any]:
    return json.loads(json.dumps(report.details, allow_nan=False))


def test_confusion_agrees_with_the_accuracy_of_each_class() -> None:
    report = evaluator().report(encoder(3), 0)
    found = shown(report)
    counts, names = np.array(found["confusion"]["counts"]), found["confusion"]["classes"]
    assert names == list(CLASSES) and counts.shape == (6, 6)
    for row, own in zip(counts, found["per_class"].values(), strict=True):
        assert row.sum() == own["num_samples"]
    assert np.trace(counts) / 60 == pytest.approx(report.metrics["acc1"])
    assert 0 < np.trace(counts) < 60 and (counts[5] == 0).all()
    assert found["gallery"] == {"picture → classes": []} and "confused" not in found


@pytest.mark.parametrize("spec", ["Flat", "HNSW32", "IVF1,Flat"])
def test_an_image_is_taken_for_its_best_class(spec: str) -> None:
    """Small whole numbers: scores are exact, and of equal ones the earlier class is ahead."""
    rng = np.random.default_rng(0)
    images, weights = (rng.integers(-2, 3, (n, 6)).astype(np.float32) for n in (50, 6))
    weights[4] = weights[2]
    target = np.arange(50) % 6
    score = images @ weights.T
    matches = Matches(Labels.of((np.arange(50), target), size=50), Labels.of((np.arange(6), np.arange(6)), size=6))
    shown, own = (lambda i: item(str(i))), np.arange(50)
    direction = Direction("", images, weights, matches, shown, shown, own, own, LOCAL, spec)
    predicted = predictions(direction, target)
    np.testing.assert_array_equal(predicted, score.argmax(axis=1))
    assert len(set(predicted.tolist())) == 5


def test_of_many_classes_the_most_frequent_mistakes_are_told() -> None:
    names = [f"c{i}" for i in range(60)]
    target, predicted = np.array([3, 3, 3, 1, 1, 5, 0]), np.array([2, 2, 3, 9, 0, 5, 59])
    found = confusion(target, predicted, names)
    assert found == {
        "confused": [
            {"true": "c3", "predicted": "c2", "count": 2},
            {"true": "c0", "predicted": "c59", "count": 1},
            {"true": "c1", "predicted": "c0", "count": 1},
            {"true": "c1", "predicted": "c9", "count": 1},
        ]
    }
    everything = np.repeat(np.arange(60), 59)
    others = np.concatenate([np.delete(np.arange(60), i) for i in range(60)])
    assert len(confusion(everything, others, names)["confused"]) == 50


def test_intervals_hold_the_accuracies() -> None:
    report = evaluator().report(encoder(3), 0)
    found = shown(report)["intervals"]
    assert found.keys() == {"acc1", "acc5", "mean_per_class_recall"}
    for metric, (low, high) in found.items():
        assert 0 <= low < report.metrics[metric] < high <= 1 and 0.02 < high - low < 0.4
    assert evaluator().report(encoder(3)).details.keys() == {"per_class"}


def test_a_label_that_is_no_class_is_named() -> None:
    labels = ["cat", "dgo"]
    with raises(DataError, "'dgo'", "'dog'"):
        evaluator(items=Rows(random_images(2)), labels=labels).report(encoder())


def test_a_task_file_becomes_prompts(tmp_path: Path) -> None:
    path = tmp_path / "task.json"
    task = {"source": "a.tar", "label": "group", "templates": ["{c}", "a {c}!"], "classes": {"cat": [], "dog": ["pup"]}}
    path.write_text(json.dumps(task))
    read = read_task(path)
    assert read.classes == {"cat": ["cat", "a cat!"], "dog": ["pup", "a pup!"]}
    assert (read.source, read.label) == (str(tmp_path / "a.tar"), "group")
    path.write_text(json.dumps({**task, "source": "s3://bucket/a.tar"}))
    assert read_task(path).source == "s3://bucket/a.tar"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"classes": None, "clases": {}}, "'clases'"),
        ({"templates": ["a photo"]}, "'a photo'"),
        ({"classes": ["cat", "cat"]}, "'cat'"),
        ({"others": "drop"}, "'drop'"),
        ({"templates": []}, ""),
        ({"classes": {"cat": []}}, ""),
        ({"classes": {"cat": "a cat", "dog": []}}, "'cat'"),
    ],
)
def test_a_wrong_task_file_is_named(change: dict[str, object], named: str, tmp_path: Path) -> None:
    path = tmp_path / "task.json"
    task = {"source": "a.tar", "label": "group", "templates": ["{c}"], "classes": {"cat": [], "dog": []}}
    path.write_text(json.dumps({**task, **change}))
    with raises(ConfigError, path, named):
        read_task(path)


def test_open_clips_templates_and_a_list_of_classes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "task.json"
    task = {"source": "a.tar", "label": "cls", "templates": ["a photo of {}.", "{c}"], "classes": ["cat", r"d\1g"]}
    path.write_text(json.dumps(task))
    assert read_task(path).classes == {"cat": ["a photo of cat.", "cat"], r"d\1g": [r"a photo of d\1g.", r"d\1g"]}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["1", "0", "02"], ["dog", "cat", "3"]),
        (["7", "0"], ["7", "cat"]),
        (["3", "0"], ["3", "0"]),
        (["dog", "1"], ["dog", "1"]),
        (["1.0"], ["1.0"]),
    ],
)
def test_numbers_are_places_in_the_list_of_classes(labels: list[str], expected: list[str]) -> None:
    """Unless one of them is a name."""
    assert class_names(labels, ["cat", "dog", "3"]) == expected


def labelled_shard(path: Path, labels: list[str]) -> Path:
    samples = [((f"{i}.png", image(i)), (f"{i}.cls", label.encode())) for i, label in enumerate(labels)]
    return write_tar(path, [member for members in samples for member in members])


def test_images_of_other_classes_are_left_out_if_the_task_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = ["0", "5", "1", "2", "0"]
    shards = open_shards([ShardSource((str(labelled_shard(tmp_path / "a.tar", numbers)),))])
    data = labelled_set(shards, ImageSpec(8, (0, 0, 0), (1, 1, 1)), DataConfig(), "cls")
    task = ZeroShotTask("a.tar", "cls", {"cat": ["cat"], "dog": ["dog"]})
    with raises(DataError, "2 of 5 samples", "'5'", '"others": "skip"'):
        keep_known_classes(data, task, "zero_shot:t.json")
    found = keep_known_classes(data, replace(task, skip_others=True), "zero_shot:t.json")
    assert "2 of 5 samples" in capsys.readouterr().err
    assert found.labels == ["cat", "dog", "cat"] and len(found.items) == 3
    assert found.keys.tolist() == data.keys[[0, 2, 4]].tolist()
    torch.testing.assert_close(found.items.block(0, 9), data.items.block(0, 9)[[0, 2, 4]])
    assert isinstance(found.items, Images) and [found.items.key(i) for i in range(3)] == ["0", "2", "4"]
    umlauts = ZeroShotTask("a.tar", "cls", {"gr\u00fcn": ["green"]})
    found = keep_known_classes(replace(data, labels=["gru\u0308n"] * 5), umlauts, "zero_shot:t.json")
    assert found.labels == ["gr\u00fcn"] * 5
    with raises(DataError, "5 of 5 samples", "'cls'"):
        keep_known_classes(replace(data, labels=["cls"] * 5), replace(task, skip_others=True), "zero_shot:t.json")


def test_all_missing_keys_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "task.json"
    path.write_text(json.dumps({"source": 3, "clases": ["cat", "dog"]}))
    with raises(ConfigError, "'source'", "'label'", "'templates'", "'clases'", "python -m eval --help"):
        read_task(path)
    assert all(f'"{key}"' in FORMAT for key in prompts.KINDS)


def test_the_model_before_training_stands_beside_the_trained_one() -> None:
    trained, before = encoder(3), encoder(4)
    own, other = (replace(evaluator(), name="eval/x").report(encode, 0) for encode in (trained, before))
    found = replace(evaluator(), untrained=lambda: before).report(trained, 0)
    assert found.metrics == own.metrics and found.details["intervals"] == own.details["intervals"]
    baseline = shown(found)["baselines"]["untrained"]
    for metric, value in baseline["metrics"].items():
        assert value == pytest.approx(other.metrics[metric])
        difference = baseline["difference"][metric]
        assert difference["value"] == pytest.approx(own.metrics[metric] - other.metrics[metric])
        assert difference["interval"][0] <= difference["value"] <= difference["interval"][1]
    assert baseline["metrics"].keys() == {"acc1", "acc5", "mean_per_class_recall"}
    assert "baselines" not in own.details


def test_files_that_are_no_task_are_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("{")
    for name in ("list.json", "text.json", "none.json"):
        with raises(ConfigError, name):
            read_task(tmp_path / name)


def wds_folder(root: Path, **files: str) -> Path:
    (root / "test").mkdir()
    for name, content in {
        "classnames": "cat\ncrane\ncrane\n",
        "zeroshot_classification_templates": "a {c}\n\n",
        **files,
    }.items():
        (root / f"{name.replace('__', '/')}.txt").write_text(content)
    return root


def test_a_clip_benchmark_folder_keeps_classes_of_one_name_apart(tmp_path: Path) -> None:
    folder = read_wds(wds_folder(tmp_path, test__nshards="2"))
    assert folder.classes == {"cat": ["a cat"], "crane (1)": ["a crane"], "crane (2)": ["a crane"]}
    assert [Path(s).relative_to(tmp_path).as_posix() for s in folder.shards] == ["test/0.tar", "test/1.tar"]
    assert folder.class_names(["2"]) == ["crane (2)"]
    for label in ("3", "cat", "-1", "7" * 5000):
        with raises(DataError, "3 classes"):
            folder.class_names([label])


def test_shards_without_a_count_are_taken_by_number(tmp_path: Path) -> None:
    for name in ("10", "9", "other"):
        (tmp_path / f"{name}.tar").touch()
    assert [Path(s).name for s in read_wds(wds_folder(tmp_path, dataset_type="retrieval")).shards] == [
        "9.tar",
        "10.tar",
    ]


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"dataset_type": "multilabel"}, "'multilabel'"),
        ({}, "test/nshards.txt"),
        ({"test__nshards": "1", "classnames": ""}, ""),
    ],
)
def test_a_wrong_clip_benchmark_folder_is_named(files: dict[str, str], named: str, tmp_path: Path) -> None:
    with raises(ConfigError, named):
        read_wds(wds_folder(tmp_path, **files))


def test_a_missing_clip_benchmark_folder_or_file_is_named(tmp_path: Path) -> None:
    with raises(ConfigError, "nowhere"):
        read_wds(tmp_path / "nowhere")
    names = wds_folder(tmp_path, test__nshards="1") / "classnames.txt"
    for content in (b"\xff\n", b"a\n" * (3 << 20)):
        names.write_bytes(content)
        with raises((ConfigError, DataError), "classnames.txt"):
            read_wds(tmp_path)
    names.unlink()
    with raises(ConfigError, "classnames.txt"):
        read_wds(tmp_path)


def test_templates_are_not_formatted() -> None:
    """A class name or template from a stranger's file reaches nothing but the text."""
    found = prompted({"{0.__class__}": [], "b": []}, ["{c} {d}"], Path("x"))
    assert found["{0.__class__}"] == ["{0.__class__} {d}"]
