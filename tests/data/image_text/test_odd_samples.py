"""Every odd image and text: what images.py and sample.py of data/image_text say becomes of it, in batches."""

from __future__ import annotations

import io
import json
import multiprocessing
import re
import resource
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.messages import raises
from helpers.shards import Member, image, problems, write_tar
from PIL import Image
from torch import Tensor

from dyad.data.base.errors import DataError, SampleError
from dyad.data.base.json_text import DEEPEST, MOST, parse_json
from dyad.data.config import DataConfig
from dyad.data.image_text.dataset import ImageText, PairMaker, text_key
from dyad.data.image_text.decode import decode
from dyad.data.image_text.image_files import read_header, refuse_many_scans
from dyad.data.image_text.in_memory import pixels
from dyad.data.image_text.items import retrieval_set
from dyad.data.image_text.sample import MAX_LETTERS, ShardSample
from dyad.data.image_text.transforms import ImageSpec, evaluation_transform
from dyad.data.shards.shards import open_shards
from dyad.data.shards.sources import parse_sources
from dyad.eval.results.thumbnails import thumbnail

SPEC = ImageSpec(8, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
LIMIT = 25_000_000
RED = (200, 0, 0)


def tokenize(texts: list[str]) -> Tensor:
    return torch.tensor([[len(text)] for text in texts])


def encoded(kind: str, *frames: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    frames[0].save(file, kind, **({"save_all": True, "append_images": frames[1:]} if frames[1:] else {}), **options)
    return file.getvalue()


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def half(first: Any, second: Any, mode: str = "RGB") -> Image.Image:
    """16 x 16: the left half of one colour, the right half of another."""
    made = Image.new(mode, (16, 16), first)
    made.paste(second, (8, 0, 16, 16))
    return made


DEEP = np.full((16, 16), 200 << 8 | 255, np.uint16)
ODD_IMAGES: dict[str, tuple[bytes, tuple[int, int, int]]] = {
    "grey": (encoded("PNG", Image.new("L", (16, 16), 200)), (200, 200, 200)),
    "1 bit": (encoded("PNG", Image.new("1", (16, 16), 1)), (255, 255, 255)),
    "palette": (encoded("PNG", Image.new("RGB", (16, 16), (204, 0, 0)).convert("P")), (204, 0, 0)),
    "CMYK": (encoded("JPEG", Image.new("CMYK", (16, 16), (0, 255, 255, 0))), (255, 0, 0)),
    "transparent": (encoded("PNG", Image.new("RGBA", (16, 16), (*RED, 0))), (255, 255, 255)),
    "16 bits": (encoded("PNG", Image.fromarray(DEEP)), (200, 200, 200)),
    "animated WebP": (encoded("WEBP", *(Image.new("RGB", (16, 16), c) for c in (RED, "blue")), lossless=True), RED),
    "animated PNG": (encoded("PNG", *(Image.new("RGB", (16, 16), c) for c in (RED, "blue"))), RED),
    "rotated by EXIF": (encoded("JPEG", half(RED, RED), exif=exif(6)), (200, 0, 0)),
    "1 x 1": (encoded("PNG", Image.new("RGB", (1, 1), RED)), RED),
    "1 x 4000": (encoded("PNG", Image.new("RGB", (1, 4000), RED)), RED),
}


def repeated_scan(side: int, times: int) -> bytes:
    """A progressive JPEG whose last scan comes so many times more."""
    data = encoded("JPEG", Image.new("L", (side, side), 128), progressive=True)
    at = data.rindex(b"\xff\xda")
    return data[:at] + data[at:-2] * times + data[-2:]


def sixteen_bit_rgb() -> bytes:
    """A PNG that PIL cannot write: 16 x 16, three channels of 16 bits."""
    row = b"\0" + struct.pack(">3H", 200 << 8 | 255, 255, 0) * 16
    return png(16, 16, zlib.compress(row * 16), depth=16, colours=2)


def png(width: int, height: int, content: bytes, depth: int = 8, colours: int = 0) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">2I5B", width, height, depth, colours, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


ODD_IMAGES["16 bits of each colour"] = (sixteen_bit_rgb(), RED)


def shard(path: Path, *samples: dict[str, bytes]) -> ImageText:
    members: list[Member] = [(f"{i}.{suffix}", data) for i, s in enumerate(samples) for suffix, data in s.items()]
    shards = open_shards(parse_sources(str(write_tar(path / "a.tar", members))), workers=0)
    return ImageText(shards, PairMaker(SPEC, tokenize, DataConfig(captions=["caption"], max_image_pixels=10_000), 0))


def fields(**values: Any) -> bytes:
    return json.dumps(values).encode()


@pytest.mark.parametrize("kind", ODD_IMAGES)
def test_an_odd_image_becomes_rgb(kind: str, tmp_path: Path) -> None:
    data, colour = ODD_IMAGES[kind]
    made = shard(tmp_path, {"img.png": data, "png": data, "json": fields(caption="a")})
    batch = made.__getitems__([(0, 0)])
    assert batch.x.shape == (1, 3, 8, 8) and not batch.bad
    np.testing.assert_allclose(batch.x[0].permute(1, 2, 0).reshape(-1, 3), [colour] * 64, atol=1)


def test_whole_numbers_of_32_bits_hold_8_or_16_bits() -> None:
    """PIL's mode I: `convert("I")` keeps the bits that the image had."""
    eight = np.array([[0, 100, 255]], np.uint8)
    shades = {"8 bits": Image.fromarray(eight), "16 bits": Image.fromarray(eight.astype(np.uint16) << 8 | 7)}
    for kind, made in shades.items():
        for given in (made, made.convert("I")):
            assert pixels(given, LIMIT)[0].tolist() == eight.tolist(), (kind, given.mode)
    beyond = Image.fromarray(np.array([[-9, 100 << 8, 70_000]], np.int32))
    assert pixels(beyond, LIMIT)[0].tolist() == eight.tolist()


def test_exif_does_not_turn_an_image() -> None:
    left = [decode(encoded("JPEG", half(RED, "blue"), exif=exif(n)), LIMIT)[:, :, :6] for n in (1, 3, 6)]
    assert torch.equal(left[0], left[1]) and torch.equal(left[0], left[2]) and left[0][0].min() > 150


GOOD = {"png": image(5, (16, 16)), "json": fields(caption="good")}
CUT = encoded("JPEG", Image.effect_noise((64, 64), 80))[:-300]
UNUSABLE: dict[str, tuple[dict[str, bytes], str]] = {
    "cut": ({"png": CUT}, "no sound JPEG, PNG or WebP image"),
    "empty file": ({"png": b""}, "no sound JPEG, PNG or WebP image"),
    "a web page": ({"png": b"<html>404</html>"}, "no sound JPEG, PNG or WebP image"),
    "another format": ({"png": encoded("BMP", Image.new("RGB", (4, 4)))}, "no sound JPEG, PNG or WebP image"),
    "too many scans": ({"png": repeated_scan(64, 100)}, "a JPEG of more than 100 scans"),
    "too many pixels": ({"png": image(1, (101, 100))}, "101 x 100 pixels are more than data.max_image_pixels=10000"),
    "no field": ({"json": fields(captoin="x")}, "has no field 'caption'"),
    "null": ({"json": fields(caption=None)}, "'caption' is None, no text"),
    "a number": ({"json": fields(caption=3)}, "'caption' is 3, no text"),
    "empty": ({"json": fields(caption="")}, "its caption in 'caption' is empty"),
    "blank": ({"json": fields(caption=" \n\t")}, "its caption in 'caption' is empty"),
    "blank as far as it is read": (
        {"json": fields(caption=" " * MAX_LETTERS + "x")},
        "its caption in 'caption' is empty",
    ),
    "no list": ({"json": fields(caption=[])}, "its caption in 'caption' is empty"),
    "one of several empty": ({"json": fields(caption=["x", ""])}, "its caption in 'caption' is empty"),
    "not UTF-8": ({"json": b'{"caption": "\xff\xfe"}'}, "its json member is not UTF-8"),
    "half a surrogate pair": ({"json": rb'{"caption": "\ud83d"}'}, "half a surrogate pair"),
    "broken json": ({"json": b'{"caption": '}, "its json member cannot be read"),
    "nested 500 times": ({"json": b'{"caption": ' + b"[" * 500 + b"]" * 500 + b"}"}, "nested more than 100 times"),
    "16 MB of lists": (
        {"json": b'{"caption": "a", "b": [' + b"[]," * 5_500_000 + b"[]]}"},
        "its json member cannot be read: more than 524,288 commas and opening brackets",
    ),
    "nested a million times": ({"json": b"[" * 1_000_000}, "its json member cannot be read"),
    "a number of 5,000 digits": ({"json": b'{"caption": ' + b"7" * 5000 + b"}"}, "its json member cannot be read"),
}


def test_fields_of_an_object_have_its_name_before_theirs() -> None:
    inner = {"caption": "inner", "deep": {"caption": "no"}}
    sample = ShardSample("a.tar", "0", {"json": fields(meta=inner, **{"meta.deep": "own", "o" * 81: inner})})
    assert sample.captions("meta.caption") == ["inner"] and sample.captions("meta.deep") == ["own"]
    assert [*sample.fields] == ["meta.caption", "meta.deep", "meta", "o" * 81]
    with raises(SampleError, "'caption'", "'meta.caption'"):
        sample.captions("caption")


def test_a_json_member_of_nothing_but_lists_costs_no_memory() -> None:
    sample = ShardSample("a.tar", "0", UNUSABLE["16 MB of lists"][0])
    grown, (told,) = peak_of(lambda: sample.captions("caption"))
    assert "more than 524,288" in told and grown < 100, (grown, told)


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_sample_that_cannot_be_used_is_replaced_and_told(kind: str, tmp_path: Path) -> None:
    odd, reason = UNUSABLE[kind]
    made = shard(tmp_path, GOOD, {**GOOD, **odd})
    batch = made.__getitems__([(0, 1), (0, 0)])
    assert batch.sample_ids.tolist() == [0, 0] and torch.equal(batch.x[0], batch.x[1])
    assert len(batch) == 2 and batch.x_keys[0] == batch.x_keys[1]
    first, *others = batch.bad
    assert (first.row, first.id, first.key) == (0, 1, "1") and first.shard.endswith("a.tar")
    assert reason in first.reason and first.reason.startswith(f"{first.shard}: sample '1'")
    assert all(other.row == 0 for other in others) and batch.bad[-1].replaced_by == 0
    if "png" not in odd:
        with raises(SampleError, "'1'"):  # an evaluation counts every item
            retrieval_set(made.shards, SPEC, tokenize, DataConfig(captions=["caption"]))


def test_a_long_caption_is_read_as_far_as_a_tower_may_see(tmp_path: Path) -> None:
    text = "x y " * 250_000  # 1 MB
    made = shard(tmp_path, {**GOOD, "json": fields(caption=text)})
    assert made.__getitems__([(0, 0)]).y.tolist() == [[MAX_LETTERS]]
    path = write_tar(tmp_path / "b.tar", [("0.png", GOOD["png"]), ("0.txt", b"x" * (1 << 20))])
    shards = open_shards(parse_sources(str(path)), workers=0)
    assert len(ShardSample.read(shards, 0).captions("txt")[0]) == MAX_LETTERS
    write_tar(path, [("0.png", GOOD["png"]), ("0.txt", b"x" * (1 << 20) + b"x")])
    assert "has 1048577 bytes, more than the limit" in problems(path)[0]


@pytest.mark.parametrize("value", ["null", r'"\ud83d x"'])
def test_a_class_that_is_none_is_refused(value: str) -> None:
    """Null is no class of the name None."""
    sample = ShardSample("a.tar", "0", {"json": f'{{"class": {value}}}'.encode()})
    for name in ("class", "cls"):
        with raises(SampleError, "a.tar", "'0'", "'class'"):
            sample.label(name)


def test_a_text_key_of_null_is_the_text_and_of_no_unicode_is_refused() -> None:
    config = DataConfig(text_key="m")
    null, half = (ShardSample("a.tar", "0", {"json": b'{"m": %b}' % value}) for value in (b"null", rb'"\ud83d x"'))
    assert text_key(null, "a", config) == text_key(null, "a", DataConfig()) != text_key(null, "b", config)
    with raises(SampleError, "a.tar", "'0'", "'m'"):
        text_key(half, "a", config)


def test_only_members_that_are_used_make_a_sample_incomplete(tmp_path: Path) -> None:
    """A sample without its image or caption is replaced as a damaged one; nobody misses the others."""
    lacking = [{"png": GOOD["png"]}, {"json": GOOD["json"]}, GOOD, {**GOOD, "txt": b"a"}, {**GOOD, "cls": b"1"}]
    batch = shard(tmp_path, GOOD, *lacking).__getitems__([(0, i) for i in range(6)])
    assert {bad.key for bad in batch.bad} == {"1", "2"} and len(batch) == 6
    assert all("has no image" in bad.reason for bad in batch.bad if bad.key == "2")
    assert batch.sample_ids.tolist()[3:] == [3, 4, 5]


def test_scans_are_counted_and_bytes_that_look_like_them_are_not() -> None:
    assert decode(repeated_scan(64, 90), LIMIT).shape == (3, 64, 64)
    plain = encoded("JPEG", Image.new("RGB", (8, 8)))
    comment = b"\xff\xfe\xff\xff" + b"\xff\xda" * 32_766 + b"\0"
    assert decode(plain[:2] + comment + plain[2:], LIMIT).shape == (3, 8, 8)
    with raises(DataError):
        read_header(plain[:2] + comment * 2 + b"\xff\x01" + repeated_scan(8, 200)[2:], LIMIT)


def test_a_sequential_jpeg_is_not_searched_for_scans() -> None:
    plain = encoded("JPEG", Image.new("RGB", (256, 256)))
    at = plain.index(b"\xff\xda")
    told = plain[:at] + plain[at:-2] * 2000 + plain[-2:]
    refuse_many_scans(told)  # the first scan has everything: decoders refuse the second
    with raises(DataError):
        decode(told, LIMIT)
    one_component = plain[at : at + 4] + b"\1" + plain[at + 5 : -2]
    with raises(DataError):
        refuse_many_scans(plain[:at] + one_component * 200)


def test_separators_in_texts_cost_nothing() -> None:
    text = 'a", ' + "," * 2 * MOST
    assert ShardSample("a.tar", "0", {"json": fields(caption="x", scanned=text)}).captions("caption") == ["x"]
    for crowded in ('["a,b",' + r'"\\",' * MOST + "1]", '["' + "," * MOST + '",' + "1," * (MOST + 1) + "1]"):
        with raises(ValueError):
            parse_json(crowded)
    with raises(ValueError):
        parse_json('["' + r"\"," * MOST)  # each of these quotes could begin a text


@pytest.mark.parametrize("inmost", ["", "1"])
def test_json_may_be_nested_so_many_times(inmost: str) -> None:
    parse_json("[" * DEEPEST + inmost + "]" * DEEPEST)
    with raises(ValueError, "nested more than"):
        parse_json("[" * (DEEPEST + 1) + inmost + "]" * (DEEPEST + 1))


# ---- bombs ---------------------------------------------------------------------------------------------------------


def bomb(side: int) -> bytes:
    """A whole PNG of side x side grey pixels, in some kilobytes: 13,000 unpack to 169 MB, to 507 MB as RGB."""
    packer, row = zlib.compressobj(9), bytes(1 + side)
    return png(side, side, b"".join([*(packer.compress(row) for _ in range(side)), packer.flush()]))


def vast(kind: str) -> bytes:
    """A JPEG or WebP whose header says 16,000 x 16,000 or so."""
    data = bytearray(encoded(kind, Image.new("RGB", (16, 16))))
    if kind == "JPEG":
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = struct.pack(">2H", 60_000, 60_000)
    else:
        at = data.index(b"\x9d\x01\x2a") + 3
        data[at : at + 4] = struct.pack("<2H", 16_000, 16_000)
    return bytes(data)


BOMBS: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: bomb(13_000),
    "JPEG": lambda: vast("JPEG"),
    "WebP": lambda: vast("WEBP"),
}


def _peak_of(attempts: list[Callable[[], object]], send: Any) -> None:
    """MiB that this process has grown by, and what it was told."""
    told = []
    torch.set_num_threads(1)  # after a fork there are no others
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))  # for the sake of the machine
    for attempt in attempts:
        try:
            attempt()
        except (DataError, RuntimeError, AssertionError) as error:
            told.append(str(error))
    send.send(((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, told))


def peak_of(*attempts: Callable[[], object]) -> tuple[float, list[str]]:
    receive, send = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_peak_of, args=(attempts, send))
    child.start()
    found = receive.recv()
    child.join()
    return found


@pytest.mark.parametrize("resize", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("size", [(1_000_000, 1), (1, 1_000_000), (1, 25_000_000)])
def test_a_very_long_image_is_brought_to_size_and_memory_stays_flat(resize: str, size: tuple[int, int]) -> None:
    """In evaluation and training, which takes the same way where no part is cropped; and as a thumbnail."""
    long = torch.full((3, *size), 7, dtype=torch.uint8)
    spec = replace(SPEC, size=224, resize=resize)

    def attempt() -> None:
        thumbnail(long)
        made = evaluation_transform(long, spec)
        assert made.shape == (3, 224, 224) and made.max() == 7 and (resize == "longest" or made.min() == 7)

    grown, told = peak_of(attempt)
    assert not told and grown < 250, (grown, told)


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_refused_by_its_header_and_memory_stays_flat(kind: str) -> None:
    data = BOMBS[kind]()
    assert len(data) < 300_000
    grown, told = peak_of(lambda: decode(data, LIMIT), lambda: read_header(data, LIMIT))
    assert len(told) == 2 and all(re.search("more .*than .*max_image_pixels", line) for line in told), told
    assert grown < 30, f"{grown:.0f} MiB"
    if kind == "PNG":  # decoded it would be half a gigabyte
        assert all(line.startswith("13000 x 13000 pixels are more than") for line in told)
