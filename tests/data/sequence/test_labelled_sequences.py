"""Sequences with classes: users of logs, frames of files, and what is refused; contexts against loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from dyad.data.base.errors import DataError
from dyad.data.config import DataConfig, ItemKind, SequenceConfig
from dyad.data.sequence.histories import Histories
from dyad.data.sequence.labelled import labelled_sequences
from dyad.eval.encode.encoder import Encoder
from dyad.eval.encode.histories import encode_histories
from dyad.train.context_config import ContextConfig
from dyad.train.distributed.world import World
from dyad.train.towers.sequence import ContextNetwork, FrameEncoder, SequenceTower
from dyad.train.towers.tower import Tower

LENGTH, FEATURES = 4, 3


def options(items: ItemKind) -> DataConfig:
    return DataConfig(items=items, sequence=SequenceConfig(length=LENGTH))


def test_users_have_the_class_of_their_column(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("user,item,time,taste\nu1,a,2,sweet\nu1,c,1,sweet\nu2,new,1,sour\nu2,b,3,sour\n")
    found = labelled_sequences([str(log)], options(ItemKind.ids), None, "taste", ["a", "b", "c"])
    assert found.labels == ["sweet", "sour"] and len(set(found.keys.tolist())) == 2
    assert found.items.block(0, 2).tolist() == [[2, 0], [1, -1]]  # sorted by time; the unknown item is left out


def test_users_that_parquet_has_as_floats_have_their_class(tmp_path: Path) -> None:
    columns = {"user": [1.0, 1.0, 2.0], "item": ["a", "b", "a"], "time": [1, 2, 3], "taste": ["sweet", "sweet", "sour"]}
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    found = labelled_sequences([str(tmp_path / "log.parquet")], options(ItemKind.ids), None, "taste", ["a", "b"])
    assert found.labels == ["sweet", "sour"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("u1,a,1,sweet\nu1,b,2,sour", ["row 2", "two classes", "u1", "sour", "sweet"]),
        ("u1,a,1,sweet\nu2,new,2,sour", ["knows no item", "u2"]),
    ],
    ids=["two classes", "unknown items"],
)
def test_users_without_one_class_are_refused(rows: str, words: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text(f"user,item,time,taste\n{rows}\n")
    with pytest.raises(DataError) as raised:
        labelled_sequences([str(log)], options(ItemKind.ids), None, "taste", ["a", "b", "c"])
    assert [word for word in [str(log), *words] if word not in str(raised.value)] == []


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two files of frames: one with a class, one with the class of each frame but the second."""
    fields = [{"speaker": "s1"}, {"speaker": ["s1", None, "s2", "s2", "s2", "s1"]}]
    for number, (steps, own) in enumerate(zip((5, 6), fields, strict=True)):
        np.save(tmp_path / f"{number}.npy", np.random.default_rng(number).normal(size=(steps, FEATURES)))
        (tmp_path / f"{number}.json").write_text(json.dumps(own))
    return [str(tmp_path / f"{number}.npy") for number in range(2)]


def test_each_file_may_have_one_class(tmp_path: Path) -> None:
    for number, steps in enumerate((3, 2, 4)):
        np.save(tmp_path / f"{number}.npy", np.ones((steps, FEATURES)))
        (tmp_path / f"{number}.json").write_text(json.dumps({"speaker": f"s{number}"}))
    paths = [str(tmp_path / f"{number}.npy") for number in range(3)]
    found = labelled_sequences(paths, options(ItemKind.frames), None, "speaker")
    assert found.labels == ["s0", "s1", "s2"] and len(found.items) == 3


@pytest.mark.parametrize("features", [True, False])
def test_contexts_of_frames_are_those_of_each_history_alone(files: list[str], features: bool) -> None:
    found = labelled_sequences(files, options(ItemKind.frames), None, "speaker")
    assert found.labels == ["s1", "s1", "s2", "s2", "s2", "s1"]
    assert len(set(found.keys.tolist())) == 2  # the frames of a file are held out together
    assert isinstance(found.items, Histories)
    torch.manual_seed(0)
    context = ContextNetwork(ContextConfig(embed_dim=2), FEATURES + 2)
    tower = SequenceTower(Tower(FrameEncoder(FEATURES, FEATURES + 2), nn.Identity()), context).eval()
    w_DE = torch.randn(FEATURES + 2, 2)
    tower.set_prediction_matrices(w_DE[None])
    own, _ = encode_histories(
        Encoder({"x": tower, "y": tower}, World(), 4, features=features, cosine=False), found.items
    )
    first, second = (torch.from_numpy(np.load(path)).float() for path in files)
    ends = [(first, 5), *[(second, end) for end in (1, 3, 4, 5, 6)]]
    for got, (frames, end) in zip(own, ends, strict=True):
        steps = tower(frames[max(0, end - LENGTH) : end])
        want = tower.contexts(steps, np.arange(len(steps)))[-1]
        want = want if features else w_DE @ want
        assert got == pytest.approx(want.detach().numpy(), abs=1e-5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"speaker": ["s1"]}', ["1 entries for 6 frames"]),
        ('{"phone": "a"}', ["'speaker'", "phone"]),
        ("[1]", ["'speaker'"]),
    ],
    ids=["too few", "other field", "no object"],
)
def test_frames_without_classes_are_refused(content: str, words: list[str], files: list[str], tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(content)
    with pytest.raises(DataError) as raised:
        labelled_sequences(files, options(ItemKind.frames), None, "speaker")
    assert [word for word in ["1.json", *words] if word not in str(raised.value)] == []
