"""Runs of images with hard negatives, texts and images, by command: shards and streams, one and two processes, what
is refused."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import Commands
from helpers.tiny_runs import SHARD, last_weights, losses, refused

Tiny = Callable[[dict[str, Any]], list[str]]
KEYS = {"data": "image_text", "data.captions": "[caption]", "data.negatives.fields": "[wrong]", "steps": 3}
KEYS |= {"data.negatives.per_row": 2}
IMAGES = {"data.negatives.pictures": 2, "data.negatives.picture_fields": "[neg0.webp,neg1.webp]"}


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return with_negatives(tmp_path / "wrong.tar")


def with_negatives(path: Path, count: int | None = None) -> Path:
    """Write the first emoji to a shard; every third has no negatives, the others one or two captions of others, and as
    many images of others."""
    with tarfile.open(SHARD) as source, tarfile.open(path, "w") as out:
        members = [(m.name, source.extractfile(m).read()) for m in source][: count and 2 * count]  # type: ignore[union-attr]
        captions = [caption_of(data) for name, data in members if name.endswith(".json")]
        images = [data for name, data in members if not name.endswith(".json")]
        number = 0
        for name, data in members:
            files = {name: data}
            if name.endswith(".json"):
                others = [(number + far) % len(captions) for far in (7, 31)][: number % 3]
                files[name] = json.dumps({**json.loads(data), "wrong": [captions[i] for i in others]}).encode()
                files |= {name.replace(".json", f".neg{k}.webp"): images[i] for k, i in enumerate(others)}
                number += 1
            for own, content in files.items():
                info = tarfile.TarInfo(own)
                info.size = len(content)
                out.addfile(info, io.BytesIO(content))
    return path


def caption_of(data: bytes) -> str:
    caption = json.loads(data)["caption"]
    return caption if isinstance(caption, str) else caption[0]


def test_one_and_two_processes_agree_and_chunks_change_nothing(
    commands: Commands, tiny: Tiny, shard: Path, tmp_path: Path
) -> None:
    """With wrong texts and images; stopped after a step, too. Each kind of them adds candidates."""
    keys = {**KEYS, **IMAGES, "data.train": shard, "optim.schedule": "const"}
    alone = commands.run(*tiny({**keys, "run.name": "alone"}))
    assert alone.code == 0, alone.out
    two = commands.world(2, *tiny({**keys, "run.name": "two", "chunk_size": 8, "data.workers": 1}))
    assert [rank.code for rank in two] == [0, 0], two[0].out
    plain = {key: value for key, value in KEYS.items() if not key.startswith("data.negatives.")}
    for name, more in (("texts", KEYS), ("plain", plain)):
        ended = commands.run(*tiny({**more, "data.train": shard, "optim.schedule": "const", "run.name": name}))
        assert ended.code == 0, ended.out
    found = {name: losses(tmp_path / "runs" / name) for name in ("alone", "two", "texts", "plain")}
    assert found["two"] == pytest.approx(found["alone"], abs=1e-4)
    assert found["alone"][0] > found["texts"][0] + 0.1 > found["plain"][0] + 0.2
    for steps in (1, 3):
        ended = commands.run(*tiny({**keys, "run.name": "resumed", "steps": steps}))
        assert ended.code == 0, ended.out
    assert last_weights(tmp_path / "runs" / "resumed") == last_weights(tmp_path / "runs" / "alone")


def test_streams_and_estimators_take_them(commands: Commands, tiny: Tiny, shard: Path, tmp_path: Path) -> None:
    for name, more in {"stream": {"data.mode": "stream"}, "sogclr": {"objective": "sogclr"}}.items():
        done = commands.run(*tiny({**KEYS, **IMAGES, "data.train": shard, "run.name": name, **more}))
        assert done.code == 0, done.out
        assert len(losses(tmp_path / "runs" / name)) == 3


def test_what_cannot_be_leaves_no_run_folder(commands: Commands, tiny: Tiny, shard: Path, tmp_path: Path) -> None:
    keys = {**KEYS, "data.train": shard, "run.name": "a"}
    mined = {"data.negatives.lists": "[mined]"}
    for more, named in (
        ({"objective": "spectral"}, ("objective=spectral", "data.negatives.per_row=0")),
        ({"data.negatives.fields": "[wrongs]"}, ("data.negatives.per_row", "data.negatives.fields")),
        (mined, ("data.negatives.lists", "data.negatives.file")),
        ({**mined, "data.negatives.refresh_every": 5}, ("data.negatives.refresh_every=5", "task=question_passage")),
        ({**IMAGES, "objective": "info_nce"}, ("objective.directions=x", "clip", "data.negatives.pictures=0")),
        ({**IMAGES, "objective": "nce"}, ("objective=nce", "clip", "data.negatives.pictures=0")),
        ({**IMAGES, "data.negatives.picture_fields": "[neg.jpg]"}, ("data.negatives.pictures", "mine=pictures")),
        (
            {**IMAGES, **mined, "data.negatives.per_row": 0, "data.negatives.picture_file": "none.jsonl"},
            ("data.negatives.picture_file=none.jsonl", "mine=pictures"),
        ),
    ):
        refused(commands.run(*tiny({**keys, **more})), 2, *named)
        assert not (tmp_path / "runs" / "a").exists(), more
