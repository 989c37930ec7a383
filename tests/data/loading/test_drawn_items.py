"""Items drawn from a catalogue: densities against plain counts, and draws that depend on seed and step alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.messages import raises
from helpers.rows import corpus_row, dpr_row, texts_of, tokenize, write_beir, write_lines
from helpers.shards import image, write_tar
from torch import Tensor

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.batch import Batch
from dyad.data.config import DataConfig, PassageConfig
from dyad.data.image_text.catalogue import caption_catalogue
from dyad.data.image_text.dataset import ImageText, PairMaker
from dyad.data.image_text.transforms import ImageSpec
from dyad.data.loading.catalogue import Catalogue
from dyad.data.loading.drawn_items import DENSITIES, DrawnItems
from dyad.data.loading.loader import build_loader
from dyad.data.loading.order import Order
from dyad.data.log_weights import LOG_Q, LogWeights, write_log_weights
from dyad.data.question_passage.catalogue import passage_catalogue
from dyad.data.question_passage.dataset import QuestionPassage
from dyad.data.question_passage.passages import Passage
from dyad.data.question_passage.questions import QuestionRows, open_questions
from dyad.data.shards.content_keys import content_key, key_name
from dyad.data.shards.shards import open_shards
from dyad.data.shards.sources import parse_sources


def of_rows(path: Path | list[Any]) -> tuple[QuestionRows, Catalogue, DataConfig]:
    config = DataConfig(passage=PassageConfig(prefix="p: ", length=64))
    questions = open_questions(path if isinstance(path, list) else str(path), config)
    return questions, passage_catalogue(questions, tokenize, config.passage), config


def texts(catalogue: Catalogue) -> list[str]:
    return [catalogue.text(int(entry)).text for entry in catalogue.starts]


def drawn_by_text(catalogue: Catalogue) -> dict[str, float]:
    return dict(zip(texts(catalogue), catalogue.draws_N.tolist(), strict=True))


def dpr(folder: Path) -> Path:
    """Row i has 1 + i mod 2 right passages, one other and one hard one; right 0 0 is right for rows 0 and 3."""
    rows = [dpr_row(i, hard=1, positives=1 + i % 2) for i in range(6)]
    rows[3]["positive_ctxs"][0] = rows[0]["positive_ctxs"][0]
    return write_lines(folder / "train.jsonl", rows)


def write_captions(folder: Path) -> Path:
    """Sample i: the text of i mod 5, and in its field a name, which means the same for i and i + 5."""
    members = []
    for i in range(9):
        fields = f'{{"name": "{"ab"[i // 5]} {i % 5}", "thing": {i % 5}}}'
        payloads = {"png": image(i), "txt": f"caption {i % 3}".encode(), "json": fields.encode()}
        members += [(f"{i:03d}.{suffix}", payload) for suffix, payload in payloads.items()]
    return write_tar(folder / "a.tar", [*members, ("009.png", image(9)), ("009.txt", b" "), ("009.json", b"{}")])


def of_captions(folder: Path, **config: Any) -> tuple[ImageText, Catalogue]:
    shards = open_shards(parse_sources(str(write_captions(folder))), workers=0)

    def letters(texts: list[str]) -> Tensor:
        return tokenize(texts, 16)

    maker = PairMaker(ImageSpec(8, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), letters, DataConfig(**config), 3)
    return ImageText(shards, maker), caption_catalogue(shards, maker)


def test_the_passages_of_rows_and_of_a_corpus(tmp_path: Path) -> None:
    _, catalogue, _ = of_rows(dpr(tmp_path))
    right = {f"right {i} {j}": 1 / (1 + i % 2) for i in range(6) for j in range(1 + i % 2)}
    right["right 0 0"] += right.pop("right 3 0")
    others = [f"{kind} {i}{end}" for i in range(6) for kind, end in (("other", ""), ("hard", " 0"))]
    assert drawn_by_text(catalogue) == {**right, **dict.fromkeys(others, 0)}
    assert (np.diff(catalogue.keys) > 0).all()
    assert catalogue.keys.tolist() == [catalogue.text(e).key for e in catalogue.starts.tolist()]
    assert catalogue.positions(np.array([catalogue.keys[3], 5])).tolist() == [3, -1]

    _, catalogue, _ = of_rows(write_beir(tmp_path / "beir"))
    judged = Counter(f"text {(3 * i + j) % 20}" for i in range(6) for j in (1, 2))
    assert drawn_by_text(catalogue) == {corpus_row(i)["text"]: judged[f"text {i}"] / 2 for i in range(20)}


def test_captions_and_what_they_mean(tmp_path: Path) -> None:
    """A caption that cannot be used is none; texts of one key are one item, which shows them as often as data do."""
    _, catalogue = of_captions(tmp_path)
    found = [catalogue.text(e) for e in catalogue.starts.tolist()]
    assert dict(zip(found, catalogue.draws_N.tolist(), strict=True)) == {f"caption {i}": 3 for i in range(3)}
    names = {"captions": ["name", "txt"], "caption_weights": [3, 1], "text_key": "thing"}
    _, catalogue = of_captions(tmp_path, **names)
    keys = {content_key(str(i).encode()): 2 - (i == 4) for i in range(5)}
    assert dict(zip(catalogue.keys.tolist(), catalogue.draws_N.tolist(), strict=True)) == keys
    drawn = DrawnItems(catalogue, DENSITIES["uniform"](catalogue, None), 20_000, 4, 0)
    shown = Counter(catalogue.text(e) for e in drawn.entries(0).tolist())
    wanted = {f"{'ab'[i // 5]} {i % 5}": 0.15 if i == 4 else 0.075 for i in range(9)}
    assert shown.keys() == {*wanted, *(f"caption {i}" for i in range(3))}
    assert all(abs(shown[name] / 20_000 - share) < 0.01 for name, share in wanted.items())


@pytest.fixture
def weights(tmp_path: Path) -> Callable[[np.ndarray, np.ndarray], str]:
    def write(keys: np.ndarray, values: np.ndarray) -> str:
        write_log_weights(LogWeights(str(tmp_path / "w.safetensors"), LOG_Q, keys, values))
        return str(tmp_path / "w.safetensors")

    return write


def test_densities_and_how_often_items_are_drawn(tmp_path: Path, weights) -> None:
    _, catalogue, _ = of_rows(dpr(tmp_path))
    n, counts = len(catalogue), catalogue.draws_N
    values = np.linspace(-2, 1, n)
    file = weights(catalogue.keys[counts > 0], values[counts > 0])
    wanted = {
        "uniform": np.full(n, 1 / n),
        "unigram": counts / counts.sum(),
        "file": np.where(counts > 0, np.exp(values), 0) / np.exp(values[counts > 0]).sum(),
    }
    for name, q in wanted.items():
        log_q = DENSITIES[name](catalogue, file)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(log_q, np.log(q), rtol=1e-12)
        entries = DrawnItems(catalogue, log_q, 50_000, 5, 0).entries(7)
        share = np.bincount(entries, minlength=n) / 50_000
        assert np.abs(share - q).sum() / 2 < 0.01 and (share[q == 0] == 0).all()


def test_files_of_other_data_are_refused(tmp_path: Path, weights) -> None:
    _, catalogue, _ = of_rows(dpr(tmp_path))
    keys, counts = catalogue.keys, catalogue.draws_N
    other = np.append(keys, keys[-1] + 1)
    with raises(DataError, key_name(int(other[-1]))):
        DENSITIES["file"](catalogue, weights(other, np.zeros(len(other))))
    first = int(np.flatnonzero(counts > 0)[0])
    missing = np.delete(keys, first)
    with raises(DataError, texts(catalogue)[first]):
        DENSITIES["file"](catalogue, weights(missing, np.zeros(len(missing))))


def test_sources_whose_prefixes_tell_noise_from_data_are_refused(tmp_path: Path) -> None:
    one, two = (str(write_lines(tmp_path / f"{n}.jsonl", [dpr_row(n)])) for n in range(2))
    with raises(ConfigError, "'a: '", "'b: '", "objective.noise=batch"):
        of_rows([{"path": one, "passage_prefix": "a: "}, {"path": two, "passage_prefix": "b: "}])
    _, catalogue, _ = of_rows([{"path": path, "passage_prefix": "a: "} for path in (one, two)])
    assert texts_of(catalogue.tokens([catalogue.text(0)]))[0].startswith("a: ")


def drawn_texts(batches: list[Batch]) -> list[str]:
    """Of one step, from all ranks: text, log q and the row of the global batch of each drawn item."""
    found, first = [], 0
    for batch in batches:
        assert batch.extra is not None and batch.extra.log_q is not None
        rows = (batch.extra.row + first).tolist()
        found += list(zip(texts_of(batch.extra.y), batch.extra.log_q.tolist(), rows, strict=True))
        first += len(batch)
    return found


def test_ranks_and_workers_and_resumed_runs_draw_the_same(tmp_path: Path) -> None:
    questions, catalogue, config = of_rows(dpr(tmp_path))
    data = QuestionPassage(questions, tokenize, config, 3, None)
    order = Order(questions.sizes, questions.weights, seed=3, global_batch_size=5)
    log_q = DENSITIES["unigram"](catalogue, None)
    q_of_text = dict(zip(texts(catalogue), log_q, strict=True))

    def load(count: int, seed: int = 3, rank: int = 0, size: int = 1, first: int = 0, workers: int = 0) -> list[Batch]:
        drawn = DrawnItems(catalogue, log_q, count, 5, seed)
        how: dict[str, Any] = {
            "rank": rank,
            "world_size": size,
            "first_step": first,
            "last_step": 4,
            "workers": workers,
        }
        return list(build_loader(data, order, **how, drawn=drawn))

    for count in (2, 5, 13):
        whole = [drawn_texts([batch]) for batch in load(count)]
        assert [len(step) for step in whole] == [count] * 4
        assert len({str(step) for step in whole}) == 4, "each step draws anew"
        assert [drawn_texts([batch]) for batch in load(count, first=2)] == whole[2:]
        assert [drawn_texts([batch]) for batch in load(count, workers=2)] == whole
        ranks = zip(*(load(count, rank=rank, size=3) for rank in range(3)), strict=True)
        assert [drawn_texts(list(step)) for step in ranks] == whole
        assert [drawn_texts([batch]) for batch in load(count, seed=4)] != whole
    for batch in load(13):
        assert batch.extra is not None and batch.y_log_q is not None and batch.extra.log_q is not None
        assert batch.y.shape[1] == batch.extra.y.shape[1]
        shown = zip(texts_of(torch.cat([batch.y, batch.extra.y])), [*batch.y_log_q, *batch.extra.log_q], strict=True)
        for text, value in shown:
            name = next(name for name in q_of_text if text.endswith(name))
            assert float(value) == pytest.approx(q_of_text[name], rel=1e-6)
        assert batch.extra.keys.tolist() == [_key(text) for text in texts_of(batch.extra.y)]


def _key(shown: str) -> int:
    title, _, text = shown.removeprefix("p: ").partition(" ")
    return Passage(text, title).key


def test_captions_bring_drawn_captions(tmp_path: Path) -> None:
    data, catalogue = of_captions(tmp_path)
    order = Order([10], [1.0], seed=0, global_batch_size=4)
    drawn = DrawnItems(catalogue, DENSITIES["unigram"](catalogue, None), 6, 4, 0)
    how: dict[str, Any] = {"rank": 0, "world_size": 1, "first_step": 0, "last_step": 2, "workers": 0}
    for batch in build_loader(data, order, **how, drawn=drawn):
        assert batch.extra is not None and batch.y_log_q is not None
        assert set(texts_of(batch.extra.y)) <= {f"caption {i}" for i in range(3)} and len(batch.extra.y) == 6
        torch.testing.assert_close(batch.y_log_q, torch.full((4,), -np.log(3.0)).float())


def test_an_item_that_cannot_be_drawn_stops_the_run(tmp_path: Path) -> None:
    questions, catalogue, config = of_rows(dpr(tmp_path))
    data = QuestionPassage(questions, tokenize, config, 3, None)
    log_q = np.where(catalogue.draws_N > 0, -np.inf, 0.0)
    batch = data.__getitems__([(0, 0)])
    with raises(DataError, key_name(int(batch.y_keys[0]))):
        DrawnItems(catalogue, log_q, 1, 1, 0).added(batch, 0, slice(0, 1))
