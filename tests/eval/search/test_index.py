"""Search: the k best of a stable sort, in shards and blocks of any size; indexes; clear words for wrong input."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from helpers.dist import launch
from helpers.eval import clustered, recall_against_exact, search, unit_rows
from helpers.messages import raises
from hypothesis import given, settings, strategies as st

from dyad.data.base.errors import ConfigError
from dyad.eval.search import index
from dyad.eval.search.index import Hits, Index
from dyad.eval.search.index_spec import Spec, check_spec


def by_definition(queries: np.ndarray, corpus: np.ndarray, k: int) -> Hits:
    scores = queries @ corpus.T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return Hits(np.take_along_axis(scores, order, axis=1), order)


def same(found: Hits, expected: Hits) -> None:
    np.testing.assert_array_equal(found.positions, expected.positions)
    np.testing.assert_array_equal(found.scores, expected.scores)


@pytest.mark.parametrize("spec", ["HNSW16", "RR64,HNSW16", "HNSW16_SQ8,RFlat;k_factor_rf=2"])
def test_a_graph_is_searched_as_deep_as_there_are_results(spec: str) -> None:
    queries, corpus = unit_rows(20, 64, 0), unit_rows(3000, 64, 1)
    recall = {}
    for chosen in (spec, f"{spec};efSearch=16"):
        made = Index(corpus, chosen)
        recall[chosen] = made.recall_against_exact(made.search(queries, 100), queries)
    assert recall[spec] > 0.85 > 0.8 > recall[f"{spec};efSearch=16"], recall


TAKEN = """Flat HNSW16 HNSW16,Flat HNSW16_SQ8 HNSW16,SQ8 IVF4,Flat IVF4_HNSW4,Flat IVF4,PQ8x4 IVF4,PQ8x4fs IVF4,SQ8
    PQ8x4 PQ8x4fs PQ8x4np SQ8 SQ6 SQ4 SQfp16 SQbf16 PCA16,Flat PCAR16,HNSW16 OPQ8_16,PQ8x4 RR16,IVF4,Flat
    HNSW16_SQ8,RFlat PQ8x4,Refine(SQ8)"""


@pytest.mark.parametrize("spec", TAKEN.split())
def test_the_best_come_first(spec: str) -> None:
    """Also of the indexes for which FAISS's factory knows no inner product: they are refused."""
    rows = clustered(400, 16, 1)
    found = Index(rows, f"{spec};nprobe=4" if "IVF" in spec else spec).search(rows[::20], 10)
    scores = np.einsum("nkd,nd->nk", rows[found.positions], rows[::20])
    assert scores[:, 0].mean() > scores[:, -1].mean() and scores[:, 0].mean() > 0.9


def test_a_graph_of_product_codes_is_refused() -> None:
    for spec in ("HNSW16_PQ8", "HNSW16_PQ8,RFlat"):
        with raises(ConfigError, f"'{spec}'"):
            Spec.parsed(spec)


def test_search_is_exact() -> None:
    queries, corpus = unit_rows(7, 16, 0), unit_rows(60, 16, 1)
    scores, positions = search(queries, corpus, 5)
    expected = by_definition(queries, corpus, 5)
    np.testing.assert_array_equal(positions, expected.positions)
    np.testing.assert_allclose(scores, expected.scores, rtol=1e-5)
    assert scores.dtype == np.float32 and positions.dtype == np.int64


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 50),
    m=st.integers(1, 300),
    k=st.integers(1, 320),
    width=st.integers(1, 4),
    shard=st.integers(1, 300),
    block=st.integers(1, 60),
    seed=st.integers(0, 1000),
)
def test_equal_scores_come_in_the_order_of_the_corpus(
    n: int, m: int, k: int, width: int, shard: int, block: int, seed: int
) -> None:
    """Small whole numbers: scores are exact, and most are equal, also at the k-th place and in other shards."""
    rng = np.random.default_rng(seed)
    queries = rng.integers(-1, 2, (n, width)).astype(np.float32)
    corpus = rng.integers(-1, 2, (m, width)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "BLOCK", block)
        patch.setattr(index, "STRIP", 50)
        found = search(queries, corpus, k, shard_bytes=4 * width * shard)
    same(found, by_definition(queries, corpus, min(k, m)))


@pytest.mark.parametrize("k", [1, 7, 150, 1000])
def test_a_collapsed_model_finds_the_first_rows(k: int) -> None:
    """FAISS takes other ways for few queries, for many, and for many answers."""
    for n in (3, 40):
        found = search(np.ones((n, 8), np.float32), np.ones((1500, 8), np.float32), k)
        np.testing.assert_array_equal(found.positions, np.tile(np.arange(k), (n, 1)))


def test_strips_give_the_first_of_a_stable_sort() -> None:
    scores = torch.from_numpy(np.random.default_rng(0).integers(0, 4, (50, 200)).astype(np.float32))
    for k in (1, 60, 200):
        values, positions = index._best_rows_of_strip(scores, k)
        expected = scores.sort(dim=1, descending=True, stable=True)
        torch.testing.assert_close(values, expected.values[:, :k], rtol=0, atol=0)
        torch.testing.assert_close(positions, expected.indices[:, :k], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_mapped_corpus_of_either_type_is_searched_as_float32(dtype: type, tmp_path: Path) -> None:
    corpus, queries = clustered(2000, 24, 0).astype(dtype), clustered(70, 24, 1)
    np.save(tmp_path / "c.npy", corpus, allow_pickle=False)
    mapped = np.load(tmp_path / "c.npy", mmap_mode="r", allow_pickle=False)
    expected = search(queries, corpus.astype(np.float32), 30, shard_bytes=50_000)
    same(search(queries, mapped, 30, shard_bytes=50_000), expected)
    same(search(queries, corpus, 30, shard_bytes=50_000), expected)
    same(search(queries, np.asfortranarray(corpus), 30, shard_bytes=50_000), expected)
    same(search(queries, mapped[::2], 30), search(queries, corpus[::2].astype(np.float32), 30))


def test_changes_to_a_mapped_corpus_are_not_lost(tmp_path: Path) -> None:
    """Pages are let go of only where the file has all that they hold."""
    np.save(tmp_path / "c.npy", np.zeros((50, 4), np.float32), allow_pickle=False)
    private = np.load(tmp_path / "c.npy", mmap_mode="c", allow_pickle=False)
    private[:] = 1.0
    found = search(np.ones((1, 4), np.float32), private, 3)
    assert found.scores.min() == 4.0 and private.min() == 1.0


def test_k_is_cut_to_the_corpus() -> None:
    assert search(unit_rows(2, 4, 0), unit_rows(3, 4, 1), 10).positions.shape == (2, 3)


def test_what_an_index_does_not_find_is_no_row_of_the_corpus() -> None:
    """FAISS says −1, which is a row: the last one."""
    corpus, queries = clustered(400, 8, 0), clustered(9, 8, 1)
    for size in (2**30, 4000):
        hits = search(queries, corpus, 400, "IVF40,Flat;nprobe=1", shard_bytes=size)
        missing = hits.positions == 400
        assert 0.5 < missing.mean() < 1 and hits.positions.min() >= 0
        np.testing.assert_array_equal(hits.scores == -np.inf, missing)
        assert (np.sort(missing, axis=1) == missing).all(), "missing ones come last"
        with pytest.raises(IndexError):
            corpus[hits.positions[0]]
        for query in range(9):
            found = hits.found(query)
            assert len(found) == (~missing[query]).sum() and len({position for position, _ in found}) == len(found)
            positions = [position for position, _ in found]
            np.testing.assert_allclose([score for _, score in found], corpus[positions] @ queries[query], rtol=1e-4)


@pytest.mark.parametrize(
    ("spec", "least"),
    [
        ("Flat", 1.0),
        ("IVF32,Flat;nprobe=32", 1.0),
        ("IVF32,Flat;nprobe=4", 0.9),
        ("HNSW16;efSearch=128", 0.95),
        ("IVF32,PQ16x4;nprobe=8", 0.4),
        ("PCA24,IVF32,PQ12x4; nprobe = 8", 0.25),
    ],
)
@pytest.mark.parametrize("size", [2**30, 2**18])
def test_recall_of_every_kind_of_index(spec: str, least: float, size: int) -> None:
    corpus, queries = clustered(4000, 32, 0), clustered(60, 32, 1)
    hits = search(queries, corpus, 10, spec, shard_bytes=size)
    recall = recall_against_exact(hits, queries, corpus)
    assert recall >= least
    exact = by_definition(queries, corpus, 10).positions
    shared = [len(set(a) & set(b)) / 10 for a, b in zip(hits.positions.tolist(), exact.tolist(), strict=True)]
    assert recall == pytest.approx(np.mean(shared))
    assert (np.diff(hits.scores, axis=1) <= 0).all()


def test_equal_scores_of_an_index_are_in_the_order_of_the_corpus_too() -> None:
    rng = np.random.default_rng(0)
    corpus, queries = (rng.integers(-1, 2, (n, 4)).astype(np.float32) for n in (400, 30))
    same(search(queries, corpus, 400, "IVF4,Flat;nprobe=4"), by_definition(queries, corpus, 400))


def test_options_reach_the_search() -> None:
    corpus, queries = clustered(4000, 32, 0, clusters=400), clustered(60, 32, 1, clusters=400)
    recalls = [
        recall_against_exact(search(queries, corpus, 50, f"IVF64,Flat;nprobe={n}"), queries, corpus) for n in (1, 4, 64)
    ]
    assert recalls[0] < recalls[1] < recalls[2] == 1.0


def test_an_inverted_file_in_shards_is_one_inverted_file() -> None:
    """Lists are learnt once, so that a query looks at the same rows however they are cut."""
    corpus, queries = clustered(3000, 16, 0), clustered(50, 16, 1)
    one = search(queries, corpus, 20, "IVF32,Flat;nprobe=3")
    many = search(queries, corpus, 20, "IVF32,Flat;nprobe=3", shard_bytes=20_000)
    np.testing.assert_array_equal(one.positions, many.positions)


def test_an_index_learns_and_is_filled_once() -> None:
    corpus, queries = clustered(3000, 16, 0), clustered(50, 16, 1)
    ready = Index(corpus, "HNSW8;efSearch=64")
    first = ready.search(queries, 5)
    ready.corpus[:] = 0  # nothing of it is read again
    same(ready.search(queries, 5), first)


def test_every_number_of_ranks_finds_the_same() -> None:
    launch("dist_search.py", 3)


@pytest.mark.gpu
def test_a_gpu_finds_the_same() -> None:
    corpus, queries = clustered(30_000, 64, 0), clustered(300, 64, 1)
    found = search(queries, corpus, 50, shard_bytes=2**22)
    expected = by_definition(queries, corpus, 50)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5)
    assert (found.positions == expected.positions).mean() > 0.999
    whole = np.random.default_rng(0).integers(-1, 2, (5000, 4)).astype(np.float32)
    same(search(whole[:100], whole, 700, shard_bytes=2**14), by_definition(whole[:100], whole, 700))


@pytest.mark.parametrize(
    "spec",
    [
        "flat",
        "",
        "IVF16,Flat;nprobe",
        "IVF16,Flat;nprobe=many",
        "IVF16,Flat;nprob=4",
        "Flat;nprobe=4",
        "IVF0,Flat",
        "HNSW0",
        "PQ4x0",
        "IVF16,Flat;nprobe=0",
        "HNSW8,RFlat;k_factor_rf=0",
        "IVF16,PQ11",
        "LSH",
        "NSG32",
        "L2norm,Flat",
        "ITQ64,Flat",
    ],
)
def test_a_bad_spec_is_refused_with_examples(spec: str) -> None:
    with raises(ConfigError, f"'{spec}'", '"IVF256,Flat;nprobe=16"') as caught:
        check_spec(spec)
    assert "\n" not in str(caught.value)
    with raises(ConfigError, f"'{spec}'", '"IVF256,Flat;nprobe=16"'):
        search(unit_rows(2, 64, 0), unit_rows(300, 64, 1), 1, spec)


def test_good_specs_pass() -> None:
    for spec in ("Flat", "IVF256,Flat;nprobe=16", "IVF256,PQ32;nprobe=16", "HNSW32;efSearch=128"):
        check_spec(spec)


@pytest.mark.parametrize("spec", ["PQ8x4", "IVF4,PQ8x4", "PCA8,IVF4,PQ8x4,RFlat"])
def test_faiss_finds_the_same_scores_with_its_polysemous_training(spec: str) -> None:
    """Which takes 40 times as long, and is off."""
    queries, corpus = unit_rows(20, 16, 0), unit_rows(600, 16, 1)
    whole = faiss.index_factory(16, spec, faiss.METRIC_INNER_PRODUCT)
    ours = Spec.parsed(spec).built(faiss, 16)
    assert trained_polysemous(whole) and not trained_polysemous(ours)
    for trained in (whole, ours):
        trained.train(corpus)
        trained.add(corpus)
    np.testing.assert_allclose(ours.search(queries, 5)[0], whole.search(queries, 5)[0], rtol=1e-5)


def trained_polysemous(part: Any) -> bool:
    inner = (faiss.downcast_index(getattr(part, name)) for name in ("base_index", "index") if hasattr(part, name))
    return getattr(part, "do_polysemous_training", False) or any(map(trained_polysemous, inner))


@pytest.mark.parametrize("spec", ["IVF256,Flat;nprobe=16", "IVF16,PQ4", "PCA4,IVF16,PQ2"])
def test_a_corpus_too_small_for_its_index_is_searched_exactly_and_that_is_told(spec: str) -> None:
    queries, corpus = unit_rows(2, 8, 0), unit_rows(100, 8, 1)
    index = Index(corpus, spec)
    same(index.search(queries, 3), search(queries, corpus, 3))
    assert (index.how["index"], index.how["instead_of"]) == ("Flat", spec)
    assert re.fullmatch(r"Number of training points \(100\) .* clusters \(\d+\)", index.how["because"])


def test_a_pca_of_fewer_rows_than_it_has_numbers_is_exact_and_a_wider_one_an_error() -> None:
    queries, corpus = unit_rows(2, 32, 0), unit_rows(10, 32, 1)
    index = Index(corpus, "PCA16,Flat")
    same(index.search(queries, 3), search(queries, corpus, 3))
    assert index.how["instead_of"] == "PCA16,Flat" and "PCA" in index.how["because"]
    with raises(ConfigError, "PCA64,Flat"):
        Index(unit_rows(100, 32, 1), "PCA64,Flat")


def test_a_missing_faiss_names_the_extras(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    for needs_it in (lambda: search(unit_rows(2, 4, 0), unit_rows(3, 4, 1), 1, "HNSW32"), lambda: check_spec("Flat")):
        with raises(ConfigError, "[cpu]", "[gpu]"):
            needs_it()


def test_an_exact_search_without_faiss_finds_the_same(monkeypatch) -> None:
    """Galleries of images are shown, whose ranks need no FAISS. Small whole numbers: many scores are equal."""
    rng = np.random.default_rng(0)
    queries, corpus = (rng.integers(-1, 2, (n, 6)).astype(np.float32) for n in (30, 200))
    want = search(queries, corpus, 7)
    monkeypatch.setitem(sys.modules, "faiss", None)
    for found, wanted in zip(search(queries, corpus, 7), want, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("spec", ["PQ48", "IVF256,PQ96", "OPQ56,IVF64,PQ56", "PQ128x4fs"])
def test_any_usual_number_of_bytes_passes_before_the_width_is_known(spec: str) -> None:
    check_spec(spec)


@pytest.mark.parametrize(("side", "factor"), [("queries", np.inf), ("corpus", np.nan)])
def test_vectors_that_are_not_finite_are_refused(side: str, factor: float) -> None:
    """They may come from a damaged file, and would never be found."""
    vectors = {"queries": unit_rows(2, 4, 0), "corpus": unit_rows(3, 4, 1)}
    vectors[side] = vectors[side] * np.float32(factor)
    with raises(ValueError, f"{side}:"):
        search(vectors["queries"], vectors["corpus"], 1)


def test_faiss_takes_little_of_a_gpu_beside_the_towers() -> None:
    """Its own default is 1.5 GB. What is said to a GPU is counted by a module in its place."""
    said: list[int] = []
    gpu = SimpleNamespace(setTempMemory=said.append)
    faiss: Any = SimpleNamespace(
        StandardGpuResources=lambda: gpu, get_num_gpus=lambda: 1, deserialize_index=lambda learnt: learnt
    )
    spec: Any = None
    index._Approximate(faiss, spec, np.zeros(1, dtype=np.uint8))
    assert said == [2**28]


@pytest.mark.parametrize("spec", ["IVF4,Flat", "HNSW8"])
def test_an_approximate_index_says_that_the_corpus_is_not_finite(spec: str) -> None:
    """FAISS's own words, of an index that is trained, blame the specification."""
    corpus = unit_rows(100, 8, 0)
    corpus[3, 2] = np.nan
    with raises(ValueError, "corpus:"):
        Index(corpus, spec).search(corpus[:1], 1)
