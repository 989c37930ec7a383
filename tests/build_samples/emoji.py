"""The emoji set: what six artists drew for the same concepts, and their Unicode names. Train on five, test on Twemoji.

Images come from Iconify packages (SVG, rasterised to 64 x 64 on white), words from emojibase-data. Base emoji, no
skin tones or components. A concept is one emoji, named by its code points as emojibase writes them: "1F468-200D-1F33E".
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from dyad.data.base.child_processes import end_with_parent
from dyad.data.base.errors import ConfigError
from tests.build_samples.emoji_names import SIZE, Concept, IconSet, match
from tests.build_samples.packages import NpmPackage, Package, fetch, write_tar

HELD_OUT = "twemoji"
SPLITS = ("trained", "unseen", "undrawn")
COMPONENT = 2  # emojibase's group of skin tones and hair
# The held-out residue of SHA-1(concept) mod 10. Any would do; this one holds out 181 of 1,914 concepts.
UNSEEN_RESIDUE = 4


@dataclass(frozen=True)
class Work:
    """Whose work, from which package, under which licence."""

    package: Package
    title: str
    author: str
    licence: str
    url: str


WORDS = Work(
    NpmPackage("emojibase-data", "17.0.0", "d01d0e2ca4e22cb402679532155342c71e2e871f25c32223c013b8b166ebdf5a"),
    "emojibase-data",
    "Miles Johnson",
    "MIT",
    "https://github.com/milesj/emojibase",
)
VENDORS = {
    "noto": Work(
        NpmPackage("@iconify-json/noto", "1.2.9", "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad"),
        "Noto Emoji",
        "Google LLC",
        "Apache-2.0",
        "https://github.com/googlefonts/noto-emoji",
    ),
    "twemoji": Work(
        NpmPackage(
            "@iconify-json/twemoji", "1.2.5", "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7"
        ),
        "Twemoji",
        "Twitter, Inc. and other contributors (jdecked)",
        "CC-BY-4.0",
        "https://github.com/jdecked/twemoji",
    ),
    "fluent-flat": Work(
        NpmPackage(
            "@iconify-json/fluent-emoji-flat",
            "1.2.6",
            "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175",
        ),
        "Fluent Emoji, flat",
        "Microsoft Corporation",
        "MIT",
        "https://github.com/microsoft/fluentui-emoji",
    ),
    "noto-v1": Work(
        NpmPackage(
            "@iconify-json/noto-v1", "1.2.5", "2bf62c26c2c2884aa99e90aec942cdaee17a5921f05690694f4978ad4b017c37"
        ),
        "Noto Emoji, version 1 (2017)",
        "Google LLC",
        "Apache-2.0",
        "https://github.com/googlefonts/noto-emoji",
    ),
    "emojione": Work(
        NpmPackage(
            "@iconify-json/emojione", "1.2.3", "26a14f44284407e8bcde91799388dca2bfd91dbcd55a97f425524a1c5b73610e"
        ),
        "EmojiOne, version 2",
        "EmojiOne (EmojiTwo)",
        "CC-BY-4.0",
        "https://github.com/EmojiTwo/emojitwo",
    ),
    "fxemoji": Work(
        NpmPackage(
            "@iconify-json/fxemoji", "1.2.2", "f3e72b3c59d05e1db03b7e308d55c0d05bd7ba3f625a90da1b79313c12858eef"
        ),
        "FxEmojis (Firefox OS)",
        "Mozilla Foundation",
        "Apache-2.0",
        "https://github.com/mozilla/fxemoji",
    ),
}


def build_emoji(out: Path, scratch: Path) -> None:
    """Write the set into `out`; downloads go to `scratch`."""
    _require_rasteriser()
    write_emoji(out, fetch([work.package for work in (WORDS, *VENDORS.values())], scratch))


def write_emoji(out: Path, packages: dict[Package, Path]) -> None:
    """Write the shards, the two zero-shot tasks and NOTICE.md, given the .tgz of each package."""
    concepts = read_concepts(packages[WORDS.package])
    sets = {name: read_icons(packages[vendor.package]) for name, vendor in VENDORS.items()}
    drawn = match(concepts, sets)
    split_of = split(concepts, drawn)
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        for vendor, drawings in drawn.items():
            here = [concept for concept in concepts if concept in drawings]
            images = pool.map(render, [sets[vendor].svg(drawings[concept]) for concept in here], chunksize=32)
            write_shards(out, vendor, dict(zip(here, images, strict=True)), split_of)
    write_tasks(out, concepts, split_of)
    (out / "NOTICE.md").write_text(notice())


def read_concepts(package: Path) -> list[Concept]:
    """The base emoji of emojibase-data, by code points."""
    meta = _member(package, "meta/groups.json")
    groups, subgroups = meta["groups"], meta["subgroups"]
    rows = [row for row in _member(package, "en/data.json") if row.get("group", COMPONENT) != COMPONENT]
    concepts = [
        Concept(r["hexcode"], r["label"], tuple(r["tags"]), groups[str(r["group"])], subgroups[str(r["subgroup"])])
        for r in rows
    ]
    return sorted(concepts, key=lambda concept: concept.code_points)


def read_icons(package: Path) -> IconSet:
    icons = _member(package, "icons.json")
    size = {key: icons[key] for key in ("left", "top", "width", "height") if key in icons}
    return IconSet(icons["icons"], icons.get("aliases", {}), size, _member(package, "chars.json"))


def _member(package: Path, name: str) -> Any:
    with tarfile.open(package) as tar:
        file = tar.extractfile(f"package/{name}")
        assert file is not None, name
        return json.load(file)


def split(concepts: Sequence[Concept], drawn: dict[str, dict[Concept, str]]) -> dict[Concept, str]:
    """concept → unseen (a tenth, by hash), undrawn (only the held-out vendor drew it) or trained."""
    trained = set().union(*(drawings for vendor, drawings in drawn.items() if vendor != HELD_OUT))
    return {c: "unseen" if _held_out(c) else "trained" if c in trained else "undrawn" for c in concepts}


def _held_out(concept: Concept) -> bool:
    return int(hashlib.sha1(concept.hexcode.encode()).hexdigest(), 16) % 10 == UNSEEN_RESIDUE


def _require_rasteriser() -> None:
    try:
        import resvg_py  # noqa: F401
    except ImportError:
        raise ConfigError(
            "build: resvg_py is missing; it turns the SVGs into images. pip install -e '.[build]'"
        ) from None


def render(svg: str) -> bytes:
    """The image as lossless WebP, 64 x 64."""
    import resvg_py
    from PIL import Image

    drawn = BytesIO(resvg_py.svg_to_bytes(svg_string=svg, skip_system_fonts=True))
    image = Image.open(drawn, formats=["PNG"]).convert("RGB")
    assert image.size == (SIZE, SIZE), image.size
    file = BytesIO()
    image.save(file, "WEBP", lossless=True, quality=80, method=6)
    assert Image.open(file, formats=["WEBP"]).convert("RGB").tobytes() == image.tobytes()
    return file.getvalue()


def write_shards(out: Path, vendor: str, images: dict[Concept, bytes], split_of: dict[Concept, str]) -> None:
    for part in SPLITS:
        chosen = {c: image for c, image in images.items() if split_of[c] == part}
        if chosen:
            write_tar(out / f"{vendor}-{part}.tar", _members(vendor, chosen))


def _members(vendor: str, images: dict[Concept, bytes]) -> Iterator[tuple[str, bytes]]:
    for concept, image in images.items():
        key = f"{concept.hexcode}-{vendor}"
        yield f"{key}.webp", image
        yield f"{key}.json", json.dumps(record(concept, vendor), ensure_ascii=False, separators=(",", ":")).encode()


def record(concept: Concept, vendor: str) -> dict[str, Any]:
    """The json member of a sample. `tagged`: the label with three tags, in three variants that never change."""
    return {
        "caption": concept.label,
        "tagged": [", ".join([concept.label, *_some_tags(concept, variant)]) for variant in range(3)],
        "tags": list(concept.tags),
        "concept": concept.hexcode,
        "vendor": vendor,
        "group": concept.group,
        "subgroup": concept.subgroup,
    }


def _some_tags(concept: Concept, variant: int) -> list[str]:
    def draw(tag: str) -> bytes:
        return hashlib.sha1(f"{concept.hexcode} {variant} {tag}".encode()).digest()

    return sorted(concept.tags, key=draw)[:3]


def write_tasks(out: Path, concepts: Sequence[Concept], split_of: dict[Concept, str]) -> None:
    for label, file in (("group", "groups.json"), ("subgroup", "subgroups.json")):
        classes: dict[str, list[str]] = defaultdict(list)
        for concept in concepts:
            classes[getattr(concept, label)] += [concept.label] if split_of[concept] == "trained" else []
        source = f"{HELD_OUT}-{{{','.join(SPLITS)}}}.tar"
        drawn = ",".join(sorted(name for name in VENDORS if name != HELD_OUT))
        task = {"train": f"{{{drawn}}}-trained.tar", "source": source, "label": label, "templates": ["{c}"]}
        task |= {"classes": dict(sorted(classes.items()))}
        (out / file).write_text(json.dumps(task, ensure_ascii=False, indent=1) + "\n")


def notice() -> str:
    """NOTICE.md: whose work the shards are, under which licence, and how they were made."""
    works = {**{f"`{name}-*.tar`": vendor for name, vendor in VENDORS.items()}, "captions, tags, groups": WORDS}
    rows = "".join(
        f"- {part}: {work.title} by {work.author}, {work.licence}, <{work.url}>\n"
        f"  from {work.package.pin}, SHA-256 `{work.package.sha256}`\n"
        for part, work in works.items()
    )
    return NOTICE.format(rows=rows, size=SIZE)


NOTICE = """\
# Emoji shards: whose work this is

Made by `python -m tests.build_samples emoji` from npm packages pinned by SHA-256;
`python -m tests.build_samples emoji check=true` builds them again and compares. `SHA256SUMS` in this folder lists every
file (`sha256sum -c SHA256SUMS`).

**Changes made to the originals:** the SVG drawings were put on a white square, rasterised to {size} x {size} pixels
with resvg and stored as lossless WebP; skin tones and components were left out; words were joined to drawings by code
point or by name.

{rows}
Licence texts: Apache-2.0 is the LICENSE file of this repository; CC-BY-4.0 is at
<https://creativecommons.org/licenses/by/4.0/legalcode>; MIT follows. The Iconify packages carry the drawings as their
authors published them. Labels and tags come from Unicode CLDR (© Unicode, Inc., <https://www.unicode.org/license.txt>).

## MIT (Fluent Emoji: Copyright (c) Microsoft Corporation; emojibase-data: Copyright (c) 2017-2019 Miles Johnson)

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""
