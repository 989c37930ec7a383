"""Every reader of images takes the same ones and decodes them alike: training from shards and folders, evaluation,
`data check`, `data pack`, and the Python API. Images of other formats are converted where they are not in a shard."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.shards import opened, write_tar
from PIL import Image, features

from dyad.data.base.errors import DataError, SampleError
from dyad.data.cli.check import examine
from dyad.data.cli.options import CheckOptions, PackOptions
from dyad.data.cli.pack import pack_pairs
from dyad.data.config import DataConfig
from dyad.data.image_text.dataset import PairMaker
from dyad.data.image_text.in_memory import pixels
from dyad.data.image_text.items import Images
from dyad.data.image_text.sample import ShardSample
from dyad.data.image_text.transforms import ImageSpec, evaluation_transform
from dyad.data.shards.sources import parse_sources
from dyad.data.tables.prepare import prepared_tables, table_options

SPEC = ImageSpec(16, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
LIMIT = DataConfig().max_image_pixels
SMOOTH = Image.linear_gradient("L").resize((40, 30)).convert("RGB")
OTHER = SMOOTH.rotate(180)
TURNED = Image.Exif()
TURNED[0x0112] = 6


def encoded(kind: str, image: Image.Image = SMOOTH, **options: Any) -> bytes:
    file = io.BytesIO()
    image.copy().save(file, kind, **options)
    return file.getvalue()


OF_FILES = {"API, bytes", "API, path", "folder", "pack of a folder"}
ALL = OF_FILES | {"training", "evaluation", "check", "pack of a tar"}


def read(suffix: str, kind: str, image: Image.Image = SMOOTH, **options: Any) -> tuple[str, bytes, set[str]]:
    return suffix, encoded(kind, image, **options), ALL


SEVERAL = {"save_all": True, "append_images": [OTHER]}
SIXTEEN = Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50)
ZOO: dict[str, tuple[str, bytes, set[str]]] = {  # its suffix, its bytes, and who reads it
    "JPEG": read("jpg", "JPEG"),
    "progressive": read("jpg", "JPEG", progressive=True),
    "grey JPEG": read("jpeg", "JPEG", SMOOTH.convert("L")),
    "CMYK": read("jpg", "JPEG", SMOOTH.convert("CMYK")),
    "Adobe's RGB": read("jpg", "JPEG", keep_rgb=True),
    "two frames of a phone (MPO)": read("jpg", "MPO", **SEVERAL),
    "turned by EXIF": read("jpg", "JPEG", exif=TURNED),
    "PNG": read("png", "PNG"),
    "16 bits": read("png", "PNG", SIXTEEN),
    "palette": read("png", "PNG", SMOOTH.convert("P")),
    "transparent palette": read("png", "PNG", SMOOTH.convert("P"), transparency=3),
    "transparent": read("png", "PNG", SMOOTH.convert("RGBA")),
    "WebP": read("webp", "WEBP"),
    "lossless WebP": read("webp", "WEBP", lossless=True),
    "animated WebP": read("webp", "WEBP", **SEVERAL),
    "another suffix": read("png", "JPEG"),
    "cut JPEG": ("jpg", encoded("JPEG")[:-150], set()),
    "cut PNG": ("png", encoded("PNG", SIXTEEN)[:-50], set()),
    "cut MPO": ("jpg", encoded("MPO", **SEVERAL)[:400], set()),
    "GIF": ("gif", encoded("GIF", **SEVERAL), OF_FILES),
    "BMP": ("bmp", encoded("BMP"), OF_FILES),
    "TIFF": ("tif", encoded("TIFF", save_all=True, append_images=[OTHER.copy()]), OF_FILES),
    "grey TIFF": ("TIFF", encoded("TIFF", SMOOTH.convert("L"), big_tiff=True), OF_FILES),
    "16 bits of TIFF": ("tiff", encoded("TIFF", SIXTEEN), OF_FILES),
    "TIFF of another suffix": ("jpg", encoded("TIFF"), OF_FILES),
    "TIFF of floating-point numbers": ("tif", encoded("TIFF", SMOOTH.convert("F")), set()),
    "cut TIFF": ("tif", encoded("TIFF")[:-150], set()),
    "cut GIF": ("gif", encoded("GIF")[:-150], set()),
    "no image": ("jpg", b"<html>404</html>", set()),
    **({"AVIF": ("avif", encoded("AVIF"), OF_FILES)} if features.check("avif") else {}),
}


def by_each(name: str, folder: Path) -> dict[str, torch.Tensor | None]:
    """What each reader makes of an image, (3, 16, 16); None where it is refused, nothing where pixels do not show."""
    suffix, data, _ = ZOO[name]
    (folder / "in").mkdir()
    (folder / "in" / f"0.{suffix}").write_bytes(data)
    (folder / "in" / "0.txt").write_text("a")
    tar = write_tar(folder / "a.tar", [(f"0.{suffix}", data), ("0.txt", b"a")])
    maker, config = PairMaker(SPEC, lambda texts: torch.zeros(len(texts), 1), DataConfig(), 0), DataConfig()

    def trained(path: Path) -> torch.Tensor:
        return maker.pair(ShardSample.read(opened(path), 0), 0, epoch=0, position=0).x

    def converted() -> torch.Tensor:
        tables = prepared_tables(table_options(config))
        return trained(Path(parse_sources(str(folder / "in"), tables=tables)[0].shards[0]))

    def packed(source: Path, out: str) -> torch.Tensor:
        pack_pairs(str(source), PackOptions(out=str(folder / out)))
        return trained(folder / out / "000000.tar")

    def checked() -> torch.Tensor:
        index = opened(tar).indexes[0]
        if bad := examine((index, range(1), CheckOptions())).bad:
            raise DataError(next(iter(bad)))
        return trained(tar)

    readers = {
        "training": lambda: trained(tar),
        "evaluation": lambda: Images(opened(tar), SPEC, config).block(0, 1)[0],
        "API, bytes": lambda: evaluation_transform(pixels(data, LIMIT), SPEC),
        "API, path": lambda: evaluation_transform(pixels(folder / "in" / f"0.{suffix}", LIMIT), SPEC),
        "check": checked,
        "folder": converted,
        "pack of a folder": lambda: packed(folder / "in", "folder"),
        "pack of a tar": lambda: packed(tar, "tar"),
    }
    found = dict[str, torch.Tensor | None]()
    for reader, reads in readers.items():
        try:
            found[reader] = reads()
        except (DataError, SampleError):
            found[reader] = None
    return found


@pytest.mark.parametrize("name", ZOO)
def test_all_readers_agree_on_an_image(name: str, tmp_path: Path) -> None:
    found = by_each(name, tmp_path)
    _, data, readers = ZOO[name]
    made = {reader: image for reader, image in found.items() if image is not None}
    assert set(found) == ALL and set(made) == readers
    for image in made.values():
        assert torch.equal(image, made["API, bytes"])
    if readers == OF_FILES:  # as PIL reads them
        by_pil = evaluation_transform(pixels(Image.open(io.BytesIO(data)), LIMIT), SPEC)
        assert torch.equal(made["folder"], by_pil)


def test_of_several_frames_the_first_is_read() -> None:
    several = pixels(ZOO["two frames of a phone (MPO)"][1], LIMIT)
    assert (several.int() - pixels(ZOO["PNG"][1], LIMIT)).abs().max() < 12
