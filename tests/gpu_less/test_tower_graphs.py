"""Towers under torch.compile: one graph without a break, compiled at most twice for batches and texts of all sizes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.step import train_step
from helpers.towers import (
    ARCHITECTURES,
    cnn,
    random_images,
    transformers_folder,
    transformers_tower,
    with_image,
    with_text,
)
from torch import Tensor, nn

from dyad.data.batch import Batch
from dyad.train.config import ModelConfig
from dyad.train.towers.build import build_image_text
from dyad.train.towers.text.pooled import Pooled
from dyad.train.towers.tower import Tower

Graphs = list[int]
SIZES = (4, 6, 9)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting() -> tuple[Callable[[nn.Module], nn.Module], Graphs]:
    """torch.compile of a whole module into one graph, with its backward in training; and a list of what it compiled."""
    from torch._dynamo.backends.debugging import aot_eager

    compiled: Graphs = []

    def backend(graph: Any, inputs: Any, **more: Any) -> Any:
        compiled.append(len(inputs))
        return aot_eager(graph, inputs, **more) if torch.is_grad_enabled() else graph

    return lambda module: torch.compile(module, backend=backend, fullgraph=True), compiled  # pyright: ignore[reportReturnType]


def open_clip_model(tmp_path: Path, **options: Any) -> Any:
    """Towers of one layer: the compiler's time grows with their number."""
    file, vit = tmp_path / "model.json", ARCHITECTURES["vit"]
    vision = {**vit["vision_cfg"], "layers": 1, "patch_dropout": options.pop("patch_dropout", 0.0)}
    file.write_text(json.dumps({**vit, "vision_cfg": vision, "text_cfg": {**vit["text_cfg"], "layers": 1}}))
    return build_image_text(ModelConfig(name=str(file), **options)).towers


def tokens(rows: int, columns: int) -> Tensor:
    """Texts of one to `columns` tokens, padded with 0."""
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(1, columns + 1, (rows, 1), generator=generator)
    return torch.randint(1, 100, (rows, columns), generator=generator).where(torch.arange(columns) < lengths, 0)


def watching() -> tuple[Callable[..., Any], list[tuple[bool, int]]]:
    """torch.compile for the arguments of our towers, whose graphs run as they are; and a list of what it compiled.

    Of each graph: whether it takes images, and the width of what it gives.
    """
    compiled: list[tuple[bool, int]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        (output,) = graph.graph.output_node().args[0]
        pixels = any(isinstance(t, Tensor) and t.dtype == torch.uint8 for t in inputs)
        compiled.append((pixels, output.meta["example_value"].shape[1]))
        return graph

    return partial(torch.compile, backend=backend, fullgraph=True), compiled


def check(tower: nn.Module, batches: list[Tensor]) -> int:
    """Train and evaluate on batches of several sizes; return how many graphs that took. A break raises."""
    compile_, compiled = counting()
    whole = compile_(tower)
    for mode in (True, False):
        tower.train(mode)
        for rows in batches:
            with torch.set_grad_enabled(mode):
                embeddings = whole(rows)
            if mode:
                embeddings.sum().backward()
            assert embeddings.isfinite().all()
    return len(compiled)


@pytest.mark.parametrize("options", [{}, {"grad_checkpointing": True, "patch_dropout": 0.5}], ids=str)
def test_an_open_clip_image_tower_is_one_graph(tmp_path: Path, options: dict[str, Any]) -> None:
    """Once for the first size and once for all others; the same again for evaluation."""
    tower = open_clip_model(tmp_path, **options).x_tower
    assert check(tower, [random_images(size, 32) for size in SIZES]) <= 4


def test_an_open_clip_text_tower_is_few_graphs_in_steps_of_mixed_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    towers = open_clip_model(tmp_path)
    compile_, compiled = watching()
    monkeypatch.setattr(torch, "compile", compile_)
    towers.y_tower.compile()
    for step in range(60):
        tower = towers.y_tower.train(step % 2 == 0)
        with torch.set_grad_enabled(step % 2 == 0):
            tower(tokens(2 + step % 40, 12), torch.arange(2 + step % 40).numpy() % (1 + step % 12) + 1)
    assert len(compiled) <= 6


def test_a_small_cnn_is_one_graph(tmp_path: Path) -> None:
    tower = build_image_text(with_image(tmp_path, cnn())).towers.x_tower
    assert check(tower, [random_images(size, 16) for size in SIZES]) <= 4


def test_steps_of_mixed_lengths_recompile_a_tower_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of uneven chunks. An image tower is one graph with preparation and projection, Pooled is another."""
    text = transformers_tower(transformers_folder(tmp_path, "bert", num_hidden_layers=1), context_length=64)
    towers = build_image_text(with_text(text)).towers
    compile_, compiled = watching()
    monkeypatch.setattr(torch, "compile", compile_)
    step = train_step(towers, 37, chunk_size=19, compile=True)
    ids, x = torch.arange(37), random_images(37, 16)
    generator = torch.Generator().manual_seed(0)
    for index in range(20):
        columns = int(torch.randint(2, 65, (1,), generator=generator))
        y = nn.functional.pad(tokens(37 + index, columns)[-37:], (0, 64 - columns))
        step(Batch(x, y, ids, ids, ids, y_lengths=(y != 0).sum(1).numpy()), index)
    assert set(compiled) == {(True, 8), (False, 32)}  # the projection of the text tower is no part of its graph
    assert max(Counter(compiled).values()) <= 3


def test_an_encoder_of_texts_is_one_graph_for_all_lengths(tmp_path: Path) -> None:
    """The grouping of rows by length is plain Python; the encoder in it takes any number of rows and tokens."""
    text = transformers_tower(transformers_folder(tmp_path, "bert", num_hidden_layers=1))
    tower = build_image_text(with_text(text)).towers.y_tower
    assert isinstance(tower, Tower)
    pooled = next(module for module in tower.modules() if isinstance(module, Pooled))
    compile_, compiled = counting()
    whole = compile_(pooled.encoder)
    for rows, columns in ((4, 8), (6, 16), (9, 16), (5, 8), (7, 12)):
        ids = tokens(rows, columns)
        whole(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state.sum().backward()
    assert len(compiled) <= 3
