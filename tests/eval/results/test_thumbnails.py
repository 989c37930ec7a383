"""Small images beside a result: what is in them, and that their folder is whole or as it was."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.messages import raises
from PIL import Image
from torch import Tensor

from dyad.data.base.errors import DataError
from dyad.data.image_text.decode import decode
from dyad.eval.results.thumbnails import SIDE, Thumbnails, thumbnail


class Decoded:
    """Images 0, 1, … in plain colours; the one at `broken` cannot be read."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def decoded(self, i: int) -> Tensor:
        if i == self.broken:
            raise DataError(f"sample {i} is damaged")
        return torch.full((3, 30, 20), 10 * i, dtype=torch.uint8)


def thumbnails(*asked: int, broken: int = -1) -> Thumbnails:
    small = Thumbnails(Decoded(broken))  # type: ignore[arg-type]
    for i in asked:
        assert small.name(i) == f"{i}.webp"
    return small


def names(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


@pytest.mark.parametrize(
    ("size", "expected"), [((400, 200), (96, 48)), ((64, 64), (64, 64)), ((10, 5000), (1, 96)), ((96, 97), (95, 96))]
)
def test_the_longer_side_is_at_most_96_pixels(size: tuple[int, int], expected: tuple[int, int]) -> None:
    image = torch.zeros(3, size[1], size[0], dtype=torch.uint8)
    found = Image.open(BytesIO(thumbnail(image)))
    assert found.format == "WEBP" and found.size == expected and max(found.size) <= SIDE


def test_transparency_is_white_and_nothing_but_pixels_is_kept() -> None:
    image = Image.new("RGBA", (200, 100), (255, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 100, 100))
    exif = Image.Exif()
    exif[0x010E] = "taken at home"
    buffer = BytesIO()
    image.save(buffer, "PNG", exif=exif, icc_profile=b"a profile")
    assert b"taken at home" in buffer.getvalue()
    small = thumbnail(decode(buffer.getvalue(), 10**6))
    assert b"EXIF" not in small and b"ICCP" not in small and b"home" not in small
    pixels = np.asarray(Image.open(BytesIO(small)).convert("RGB")).astype(int)
    assert (pixels[:, :40] > 250).all() and (pixels[:, 56:, 0] > 240).all() and (pixels[:, 56:, 1:] < 15).all()


def test_the_folder_is_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "val.pictures"
    thumbnails(3, 1, 3).write(folder)
    assert names(tmp_path) == ["val.pictures", "val.pictures/1.webp", "val.pictures/3.webp"]
    assert np.asarray(Image.open(folder / "3.webp"))[0, 0].tolist() == pytest.approx([30] * 3, abs=2)
    thumbnails(2).write(folder)
    assert names(tmp_path) == ["val.pictures", "val.pictures/2.webp"]
    (tmp_path / ".val.pictures.partial").mkdir()  # of one that was killed
    thumbnails(4, 5).write(folder)
    assert names(folder) == ["4.webp", "5.webp"] and names(tmp_path)[0] == "val.pictures"
    thumbnails().write(folder)
    assert names(tmp_path) == []


def test_an_image_that_cannot_be_read_leaves_the_old_ones(tmp_path: Path) -> None:
    folder = tmp_path / "val.pictures"
    thumbnails(1).write(folder)
    with raises(DataError, "sample 8"):
        thumbnails(2, 8, broken=8).write(folder)
    assert names(tmp_path) == ["val.pictures", "val.pictures/1.webp"]
