"""imagenet:FOLDER of the suite: class folders, prompts, and accuracies by open_clip's formula on the same folders."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.messages import raises
from helpers.runs import distinct_emoji, make_run
from open_clip import zero_shot_metadata
from torch.nn.functional import normalize

from dyad.data.base.errors import ConfigError
from dyad.data.image_text.decode import decode
from dyad.data.tables import prepare
from dyad.evaluation.kinds.imagenet import class_folders, class_prompts
from dyad.evaluation.load_run import find_run, load_run
from dyad.evaluation.main import main

IDS, INDICES = [f"n{7 * i:08}" for i in range(1000)], [str(i) for i in range(1000)]
NAMES = {"val": IDS, "v2": INDICES}  # folder → its class folders


def test_accuracies_are_those_of_open_clip(tmp_path: Path, monkeypatch) -> None:
    """The class folder of each picture is that of its 1st, 3rd or 700th class by open_clip's formula."""
    templates = [lambda c: f"a {c}.", lambda c: f"{c} at night"]
    monkeypatch.setattr(zero_shot_metadata, "OPENAI_IMAGENET_TEMPLATES", templates)
    emoji, run = distinct_emoji(6), make_run(tmp_path, val=None)
    model = load_run(*find_run(str(run))).model
    with torch.no_grad():
        texts = model.tokenize([t(c) for c in zero_shot_metadata.IMAGENET_CLASSNAMES for t in templates])
        weights = normalize(normalize(model.towers.y_tower(texts), dim=-1).reshape(1000, 2, -1).mean(1), dim=-1)
        x = model.towers.x_tower(torch.stack([decode(e.image, 10_000) for e in emoji]))
    order = np.argsort(-(x @ weights.T).numpy(), axis=1)
    for name, names in NAMES.items():
        (tmp_path / name).mkdir()
        folders(tmp_path / name, names)
        for number, place in enumerate((0, 0, 2, 3, 699, 699)):
            (tmp_path / name / names[order[number, place]] / f"{number}.webp").write_bytes(emoji[number].image)
    suite = f"suite=[imagenet:{tmp_path}/val,imagenet:{tmp_path}/v2/]"
    of_training = ["columns=[filepath,title]", "image_key=img.png"]  # they say nothing about these folders
    words = ["eval", f"checkpoint={run}", suite, f"out={tmp_path}/out", "examples=0", *of_training]
    monkeypatch.setattr(sys, "argv", words)
    main()
    for name in NAMES:
        result = json.loads((tmp_path / "out" / f"imagenet-{name}.json").read_text())
        metrics = result["metrics"]
        assert (metrics["acc1"], metrics["acc5"], metrics["num_samples"]) == (2 / 6, 4 / 6, 6)
        assert result["per_class"]["missile (657)"]["num_samples"] == 0 and len(result["per_class"]) == 1000


def folders(root: Path, names: list[str]) -> Path:
    for name in (*names, ".cache"):
        (root / name).mkdir()
    (root / "valprep.sh").touch()
    return root


@pytest.mark.parametrize("names", [IDS, INDICES], ids=["ids", "indices"])
def test_folders_are_in_the_order_of_the_classes(tmp_path: Path, names: list[str]) -> None:
    assert class_folders(folders(tmp_path, names[::-1])) == names


@pytest.mark.parametrize(
    ("names", "named"),
    [
        ([], ["0 class folders"]),
        (["train", "val"], ["2 class folders", "'train'"]),
        (IDS[:-1], ["999 class folders"]),
        ([*IDS[:-1], "tench"], ["'tench'"]),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, names: list[str], named: list[str]) -> None:
    with raises(ConfigError, f"imagenet:{tmp_path}", *named, "n01440764", "0 … 999"):
        class_folders(folders(tmp_path, names))


def test_the_prompts_are_those_of_open_clip() -> None:
    prompts = class_prompts()
    assert [*prompts.values()] == [
        [t(name) for t in zero_shot_metadata.OPENAI_IMAGENET_TEMPLATES]
        for name in zero_shot_metadata.IMAGENET_CLASSNAMES
    ]
    assert {"tench", "missile (657)", "missile (744)"} < prompts.keys()


def test_the_validation_images_are_small_enough_to_be_converted_at_a_start() -> None:
    assert prepare.LARGEST > 6_744_924_160  # bytes of ILSVRC2012_img_val.tar
