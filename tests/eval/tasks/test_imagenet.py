"""ImageNet as a folder of class folders: their order, and the prompts of open_clip."""

from pathlib import Path

import pytest
from helpers.messages import raises
from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES

from dyad.data.base.errors import ConfigError
from dyad.data.tables import prepare
from dyad.eval.tasks.imagenet import class_folders, class_prompts

IDS = [f"n{7 * i:08}" for i in range(1000)]
INDICES = [str(i) for i in range(1000)]


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
    assert [*prompts.values()] == [[t(name) for t in OPENAI_IMAGENET_TEMPLATES] for name in IMAGENET_CLASSNAMES]
    assert {"tench", "missile (657)", "missile (744)"} < prompts.keys()


def test_the_validation_images_are_small_enough_to_be_converted_at_a_start() -> None:
    assert prepare.LARGEST > 6_744_924_160  # bytes of ILSVRC2012_img_val.tar
