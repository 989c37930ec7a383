"""Encoding a corpus into a folder: resumed after any end, the same bits at every number of ranks, bounded memory."""

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from helpers.cli import Running, server
from helpers.eval import LOCAL, search
from helpers.messages import raises
from hypothesis import given, settings, strategies as st
from jobs.embeddings_job import BLOCK, ITEMS, WINDOW, Glosses, Small, digest, encoded, names, texts_of, write_corpus
from torch import Tensor, nn

from dyad.data.base import progress
from dyad.data.base.errors import ConfigError, DataError, HardwareError
from dyad.eval.encode import embeddings
from dyad.eval.encode.embeddings import encode_corpus, identity_of
from dyad.eval.encode.encoder import Encoder
from dyad.train.config import Pooling
from dyad.train.towers.text.pooled import Pooled


def start(corpus: Path, folder: Path, size: int, seconds: float = 0.0) -> list[Running]:
    """One process a rank."""
    (folder.parent / f"{folder.name}.meeting").unlink(missing_ok=True)
    words = ["jobs.embeddings_job", str(corpus), str(folder)]
    return [server().start(*words, str(rank), str(size), str(seconds)) for rank in range(size)]


def finished(ranks: list[Running]) -> list[str]:
    """The two digests that every rank prints."""
    ended = [rank.wait() for rank in ranks]
    assert [rank.code for rank in ended] == [0] * len(ranks), ended
    said = [rank.out.split()[-2:] for rank in ended]
    assert all(words == said[0] for words in said)
    return said[0]


def windows_done(folder: Path) -> int:
    state = folder / "state.json"
    return json.loads(state.read_text())["windows"] if state.exists() else 0


def ids_in(folder: Path) -> list[str]:
    return (folder / "ids.txt").read_text().splitlines()


def begun(folder: Path, ranks: list[Running], windows: int) -> None:
    """Wait until so many windows are on disk and the processes still at work."""
    while windows_done(folder) < windows:
        states = [psutil.Process(rank.pid).status() for rank in ranks]
        assert psutil.STATUS_ZOMBIE not in states, "over before it was killed"
        time.sleep(0.01)


def killed(ranks: list[Running]) -> None:
    for rank in ranks:
        os.kill(rank.pid, signal.SIGKILL)
    assert [rank.wait().code for rank in ranks] == [-signal.SIGKILL] * len(ranks)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20,000 texts in a file."""
    path = tmp_path_factory.mktemp("corpus") / "glosses.jsonl"
    write_corpus(path)
    return path


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them encoded by one process without an end."""
    folder = tmp_path_factory.mktemp("whole") / "e"
    encoded(folder, LOCAL, texts_of(corpus))
    return folder


def same_files(one: Path, other: Path) -> None:
    for name in ("embeddings.npy", "ids.txt", "state.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_two_ranks_killed_halfway_and_started_again(corpus: Path, whole: Path, tmp_path: Path) -> None:
    """The same bits as one process without an end, of the embeddings and of the search in them."""
    ranks = start(corpus, tmp_path / "e", 2, seconds=0.05)
    begun(tmp_path / "e", ranks, windows=4)
    killed(ranks)
    assert 4 <= windows_done(tmp_path / "e") < -(-ITEMS // WINDOW)
    found = finished(start(corpus, tmp_path / "e", 2))
    same_files(tmp_path / "e", whole)
    vectors = np.load(whole / "embeddings.npy", allow_pickle=False)
    assert found == [digest(vectors), digest(*search(vectors[::400], vectors, 10, shard_bytes=1 << 20))]


def test_a_second_process_is_kept_out_and_goes_on_when_the_first_is_killed(
    corpus: Path, whole: Path, tmp_path: Path
) -> None:
    first = start(corpus, tmp_path / "e", 1, seconds=0.03)
    try:
        begun(tmp_path / "e", first, windows=2)
        with raises(ConfigError, first[0].pid):
            encoded(tmp_path / "e", LOCAL, texts_of(corpus))
    finally:
        killed(first)
    assert 2 <= windows_done(tmp_path / "e") < -(-ITEMS // WINDOW)
    encoded(tmp_path / "e", LOCAL, texts_of(corpus))
    same_files(tmp_path / "e", whole)


def test_values_are_those_of_the_tower_in_the_items_order(tmp_path: Path) -> None:
    items, tower = Glosses(700), Small()
    plain = np.concatenate([tower(items.take([i])).detach().numpy() for i in range(700)])
    plain /= np.linalg.norm(plain, axis=1, keepdims=True)
    encode = Encoder({"y": tower}, LOCAL, block=64)
    kept = encode_corpus(encode, "y", items, tmp_path / "e", ids=names, window=200)
    np.testing.assert_allclose(kept, plain, rtol=1e-4, atol=1e-6)
    assert isinstance(kept, np.memmap) and kept.dtype == np.float32 and not kept.flags.writeable
    assert ids_in(tmp_path / "e") == names(0, 700) and len(kept) == 700
    np.testing.assert_array_equal(np.load(tmp_path / "e/embeddings.npy", allow_pickle=False), kept)
    in_ram = encode_corpus(encode, "y", items, None, window=200)
    np.testing.assert_array_equal(in_ram, kept)


def test_blocks_hold_texts_of_like_length() -> None:
    """All windows together: hardly any token is padding, where the file's order pads more than half."""
    seen: list[Tensor] = []
    tower = Small()
    tower.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    encode_corpus(Encoder({"y": tower}, LOCAL, block=64), "y", Glosses(4000), None, window=1000)
    shares = [float((tokens > 0).float().mean()) for tokens in seen]
    assert float(np.mean(shares)) > 0.55 > 0.3 > float((Glosses(64).take(range(64)) > 0).float().mean())
    assert max(tokens.shape[1] for tokens in seen) == seen[0].shape[1], "the longest come first"


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200, 400, 401])
def test_every_item_counts_once_wherever_windows_and_blocks_end(count: int, tmp_path: Path) -> None:
    calls: list[int] = []
    tower = Small()
    tower.register_forward_hook(lambda *_: calls.append(1))
    encode = Encoder({"y": tower}, LOCAL, block=64)
    kept = encode_corpus(encode, "y", Glosses(count), tmp_path / "e", ids=names, window=100)  # rounded up to 128
    assert len(calls) == -(-count // 64) and windows_done(tmp_path / "e") == -(-count // 128)
    plain = encode_corpus(encode, "y", Glosses(count), None, window=100_000)
    np.testing.assert_allclose(kept, plain, rtol=1e-5, atol=1e-6)


@settings(max_examples=10, deadline=None)
@given(count=st.integers(1, 300), block=st.integers(1, 50), window=st.integers(1, 120), done=st.integers(0, 5))
def test_from_any_window_on_the_rest_is_the_same(count: int, block: int, window: int, done: int) -> None:
    encode, size = Encoder({"y": Small()}, LOCAL, block=block), -(-window // block) * block
    whole = dict(embeddings._windows(encode, "y", Glosses(count), size, 0))
    first = min(done * size, (count - 1) // size * size)
    rest = dict(embeddings._windows(encode, "y", Glosses(count), size, first))
    assert list(rest) == list(range(first, count, size))
    for begin, vectors in rest.items():
        np.testing.assert_array_equal(vectors, whole[begin])


class Twins(Glosses):
    """Every tenth text is the same."""

    def take(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows)[:, None].remainder(10).expand(-1, 3)


class Uneven(nn.Module):
    """Gives every row of a block other last bits."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + 1 + 1e-6 * torch.arange(len(inputs))[:, None]


def test_equal_items_of_a_window_have_equal_embeddings() -> None:
    encode = Encoder({"y": Uneven()}, LOCAL, block=8, cosine=False)
    found = encode_corpus(encode, "y", Twins(96), None, window=48)
    assert [len(np.unique(part, axis=0)) for part in (found[:48], found[48:])] == [10, 10]


def test_what_is_whole_is_only_opened(tmp_path: Path) -> None:
    before = encoded(tmp_path / "e", LOCAL, Glosses(3000))
    stamp = (tmp_path / "e/embeddings.npy").stat().st_mtime_ns
    again = encoded(tmp_path / "e", LOCAL, Glosses(3000), seconds=1e9)
    np.testing.assert_array_equal(before, again)
    assert (tmp_path / "e/embeddings.npy").stat().st_mtime_ns == stamp


def torn(folder: Path, how: str) -> None:
    """What a crash may leave: state.json is the last to be written."""
    state = json.loads((folder / "state.json").read_text())
    if how == "rows of a window without its state":
        state["windows"] -= 1
        (folder / "state.json").write_text(json.dumps(state))
        with (folder / "embeddings.npy").open("r+b") as file:
            file.seek(-1000, os.SEEK_END)
            file.write(b"x" * 500)
    else:
        state["windows"] = 0
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "ids.txt").write_text("half a li")
        if how == "no vectors":
            (folder / "embeddings.npy").unlink()
        else:
            (folder / "embeddings.npy").write_bytes(b"\x93NUMPY")


@pytest.mark.parametrize("how", ["rows of a window without its state", "no vectors", "a header cut short"])
def test_torn_writes_are_mended(how: str, tmp_path: Path) -> None:
    whole = np.array(encoded(tmp_path / "e", LOCAL, Glosses(5000)))
    torn(tmp_path / "e", how)
    mended = encoded(tmp_path / "e", LOCAL, Glosses(5000))
    np.testing.assert_array_equal(mended, whole)
    assert ids_in(tmp_path / "e") == names(0, 5000)


def test_of_something_else_it_is_made_anew_with_a_line(tmp_path: Path) -> None:
    said: list[str] = []
    encode = Encoder({"y": Small()}, LOCAL, block=64)

    def filled(count: int, identity: str, dtype: str = "float32") -> np.ndarray:
        items = Glosses(count)
        return encode_corpus(
            encode, "y", items, tmp_path / "e", ids=names, identity=identity, dtype=dtype, log=said.append
        )

    filled(300, "these weights")
    assert said == []
    filled(300, "those weights")
    assert said == [f"{tmp_path}/e: has embeddings of other identity; they are made anew"]
    half = filled(200, "those weights", "float16")
    assert said[1:] == [f"{tmp_path}/e: has embeddings of other items, dtype; they are made anew"]
    assert half.shape == (200, 32) and half.dtype == np.float16
    np.testing.assert_allclose(half, encode_corpus(encode, "y", Glosses(200), None), atol=1e-3)


def test_progress_is_told_in_lines_and_shown_on_a_terminal(monkeypatch, capsys) -> None:
    encode = Encoder({"y": Small()}, LOCAL, block=64)
    encode_corpus(encode, "y", Glosses(300), None, window=100)
    assert capsys.readouterr().out == "", "what is quick needs no words"
    monkeypatch.setattr(progress, "EVERY", 0.0)
    encode_corpus(encode, "y", Glosses(300), None, window=100)
    lines = capsys.readouterr().out.splitlines()
    expected = [r"Encode y \[128/300 \(42%\)\]", r"Encode y \[256/300 \(85%\)\]", r"Encode y \[300/300 \(100%\)\]"]
    for line, start in zip(lines, expected, strict=True):
        assert re.fullmatch(start + r" [\d.]+/s ETA \d+:\d\d:\d\d", line)
    said: list[str] = []
    encode_corpus(encode, "y", Glosses(300), None, window=300, log=said.append)
    assert len(said) == 1 and capsys.readouterr().out == ""
    monkeypatch.setattr(progress, "on_terminal", lambda stream: True)
    encode_corpus(encode, "y", Glosses(300), None, window=100)
    assert "300/300" in capsys.readouterr().out


def test_identity_is_of_weights_and_facts_and_not_of_compilation() -> None:
    tower = Small()
    known = identity_of(tower, "corpus", "passage: ")
    assert known == identity_of(tower, "corpus", "passage: ") and re.fullmatch("[0-9a-f]{64}", known)
    assert known != identity_of(tower, "corpus", "")
    assert known != identity_of(tower, "corpuspassage: ")
    tower.compile()
    assert known == identity_of(tower, "corpus", "passage: ")
    with torch.no_grad():
        tower.layer.bias[3] += 1e-7
    assert known != identity_of(tower, "corpus", "passage: ")


def test_the_same_weights_pooled_otherwise_are_another_tower() -> None:
    mean, first = (Pooled(Small(), pooling, pad=0) for pooling in (Pooling.mean, Pooling.cls))
    first.load_state_dict(mean.state_dict())
    assert identity_of(mean) != identity_of(first)


class Broken(Glosses):
    def take(self, rows) -> Tensor:
        raise DataError("corpus.jsonl line 7: damaged")


class Huge(nn.Module):
    def forward(self, tokens_bL: Tensor) -> Tensor:
        return torch.full((len(tokens_bL), 4), 1e5)


class Diverged(nn.Module):
    """Item 333 has no finite embedding: the only one of 60 tokens."""

    def forward(self, tokens_bL: Tensor) -> Tensor:
        return torch.where((tokens_bL > 0).sum(1, keepdim=True) == 61, torch.nan, torch.ones(len(tokens_bL), 4))


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    small = Encoder({"y": Small()}, LOCAL, block=64)

    def refused(kind: type[Exception], named: str, folder: str, items: Glosses | None = None, **given: object) -> None:
        arguments = {"ids": names, "encode": small, **given}
        encode = arguments.pop("encode")
        with raises(kind, named):
            encode_corpus(encode, "y", items or Glosses(500), tmp_path / folder, **arguments)  # type: ignore[arg-type]

    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/embeddings.npy").write_bytes(b"mine")
    refused(ConfigError, "state.json", "theirs")
    assert (tmp_path / "theirs/embeddings.npy").read_bytes() == b"mine"
    refused(DataError, r"'a\nb'", "b", ids=lambda start, stop: ["a\nb"] * (stop - start))
    refused(DataError, r"'\ud800'", "b", ids=lambda start, stop: ["\ud800"] * (stop - start))
    refused(DataError, "corpus.jsonl line 7", "c", Broken(500))
    unscaled = Encoder({"y": Huge()}, LOCAL, block=64, cosine=False)
    refused(DataError, "dtype=float32", "d", encode=unscaled, dtype="float16")
    odd = Glosses(500)
    odd.lengths[333] = 61
    refused(DataError, "item 333", "e", odd, encode=Encoder({"y": Diverged()}, LOCAL, 50), window=100)
    assert windows_done(tmp_path / "e") == 3
    (tmp_path / "file").write_text("")
    refused(HardwareError, str(tmp_path / "file"), "file")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", b"{"),
        ("state.json", b'{"settings": {}, "windows": -1}'),
        ("state.json", b"[]"),
        ("embeddings.npy", b""),
        ("embeddings.npy", None),
    ],
)
def test_damage_is_named(name: str, content: bytes | None, tmp_path: Path) -> None:
    encoded(tmp_path / "e", LOCAL, Glosses(300))
    if content is None:
        np.save(tmp_path / "e" / name, np.zeros((299, 32), np.float32))
    else:
        (tmp_path / "e" / name).write_bytes(content)
    with raises(DataError, name):
        encoded(tmp_path / "e", LOCAL, Glosses(300))


def test_more_windows_than_items_fill_are_no_embeddings(tmp_path: Path) -> None:
    encoded(tmp_path / "e", LOCAL, Glosses(300))
    state = tmp_path / "e" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "windows": 10**9}))
    with raises(DataError, str(state), f"windows={10**9}"):
        encoded(tmp_path / "e", LOCAL, Glosses(300))


def test_a_full_disk_is_noticed_before_it_is_full(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 999})())
    with raises(ConfigError, "38,400 bytes"):
        encoded(tmp_path / "e", LOCAL, Glosses(300))


class Wide(nn.Module):
    """Tokens (b, L) → (b, 1024) that cost nothing."""

    def forward(self, tokens_bL: Tensor) -> Tensor:
        return tokens_bL[:, :1].float() + torch.arange(1024)


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """30,000 × 1024 float32 are 117 MiB; a window of 2048 is 8."""
    encode = Encoder({"y": Wide()}, LOCAL, block=BLOCK)
    encode_corpus(encode, "y", Glosses(1), None)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of earlier tests
    before = resident("VmRSS")
    kept = encode_corpus(encode, "y", Glosses(30_000), tmp_path / "e", ids=names, window=2048)
    assert (tmp_path / "e/embeddings.npy").stat().st_size > 115 << 20
    assert resident("VmHWM") - before < 60
    search(np.array(kept[:3]), kept, 5, shard_bytes=16 << 20)
    assert resident("VmHWM") - before < 80


def resident(field: str) -> int:
    """MiB."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) // 1024
