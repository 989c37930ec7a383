"""Entries probe:TASK.json of eval.suite, and the models that they do not suit."""

import json
from pathlib import Path

from helpers.messages import raises
from helpers.shards import image

from dyad.data.base.errors import ConfigError
from dyad.data.config import DataConfig, ItemKind
from dyad.evaluation.suite import check_suite, forms_help
from dyad.train.config import Task, TrainConfig
from dyad.train.eval_config import EvalConfig


def test_models_without_features_of_images_or_texts_are_not_probed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "mood": "good"}\n')
    probe = tmp_path / "probe.json"
    probe.write_text(json.dumps({**dict.fromkeys(("train", "test"), str(tmp_path / "a.jsonl")), "label": "mood"}))

    def check(task: Task, items: ItemKind) -> None:
        check_suite(TrainConfig(task, data=DataConfig(items=items), eval=EvalConfig(suite=[f"probe:{probe}"])))

    with raises(ConfigError, f"probe:{probe}", "language_model"):
        check(Task.language_model, ItemKind.texts)
    for items in (ItemKind.ids, ItemKind.frames):
        with raises(ConfigError, f"probe:{probe}", "context_probe"):
            check(Task.sequence, items)
    for task in (Task.views, Task.sequence):
        with raises(ConfigError, probe, "images"):
            check(task, ItemKind.pictures)
        check(task, ItemKind.texts)
    check(Task.image_text, ItemKind.pictures)
    (folder := tmp_path / "folder").mkdir()  # its metadata.jsonl is a table of images
    (folder / "metadata.jsonl").write_text('{"file_name": "a.png", "mood": "good"}\n')
    (folder / "a.png").write_bytes(image(0))
    probe.write_text(json.dumps({"train": str(folder), "test": str(folder), "label": "mood"}))
    check(Task.views, ItemKind.pictures)
    assert "probe:" not in next(line for line in forms_help().splitlines() if "of language_model" in line)
