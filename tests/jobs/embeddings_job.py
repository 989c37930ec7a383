"""Encode gloss-like texts as one rank of several, and search them; a process to be killed. No torchrun: see kill -9.

jobs.embeddings_job CORPUS FOLDER RANK WORLD_SIZE SECONDS_A_BLOCK → prints digests of embeddings and of search
"""

import hashlib
import json
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from helpers.eval import search
from torch import Tensor, nn

from dyad.data.config import PassageConfig
from dyad.data.question_passage.corpus import open_corpus
from dyad.data.question_passage.dataset import passage_texts
from dyad.eval.encode.embeddings import SizedItems, encode_corpus, identity_of
from dyad.eval.encode.encoder import Encoder
from dyad.train.distributed.world import World

ITEMS, WINDOW, BLOCK = 20_000, 2048, 128
WORDS = 500


class Glosses:
    """Texts of 2 to 60 words in memory, as tokens, each made from its number."""

    def __init__(self, count: int) -> None:
        self.lengths = np.random.default_rng(0).geometric(0.09, count).clip(2, 60)

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: Sequence[int]) -> Tensor:
        return padded([words(row, int(self.lengths[row])).tolist() for row in rows])


def words(number: int, count: int) -> np.ndarray:
    return np.random.default_rng(number).integers(1, WORDS, count)


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    tokens = np.zeros((len(rows), -(-max(map(len, rows)) // 8) * 8), np.int64)
    for into, row in zip(tokens, rows, strict=True):
        into[: len(row)] = row
    return torch.from_numpy(tokens)


class Words:
    """A token for each word."""

    pad = 0

    def __call__(self, texts: list[str], length: int, pairs: list[str] | None = None) -> Tensor:
        hashed = [[zlib.crc32(word.encode()) for word in text.split()[:length]] for text in texts]
        return padded([[1 + number % (WORDS - 1) for number in row] for row in hashed])


tokenize = Words()


def write_corpus(path: Path) -> None:
    """The same kind of texts as rows of a file."""
    lengths = Glosses(ITEMS).lengths
    with path.open("w") as file:
        for number, length in enumerate(lengths.tolist()):
            text = " ".join(f"word{word}" for word in words(number, length))
            file.write(json.dumps({"_id": f"gloss-{number}", "title": "", "text": text}) + "\n")


class Small(nn.Module):
    """Tokens (b, L), 0 is padding → (b, D)."""

    def __init__(self, seconds: float = 0.0, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seconds = seconds
        self.embed, self.layer = nn.Embedding(WORDS, width), nn.Linear(width, width)

    def forward(self, tokens_bL: Tensor) -> Tensor:
        time.sleep(self.seconds)
        weight_bL1 = (tokens_bL > 0).float()[:, :, None]
        mean_bD = (self.embed(tokens_bL) * weight_bL1).sum(1) / weight_bL1.sum(1)
        return torch.tanh(self.layer(mean_bD))


def encoded(folder: Path | None, world: World, items: SizedItems, seconds: float = 0.0) -> np.ndarray:
    tower = Small(seconds)
    encode = Encoder({"y": tower}, world, block=BLOCK)
    identity = identity_of(tower, "glosses")
    return encode_corpus(encode, "y", items, folder, ids=names, identity=identity, window=WINDOW)


def names(start: int, stop: int) -> list[str]:
    return [f"gloss-{i}" for i in range(start, stop)]


def texts_of(corpus: Path) -> SizedItems:
    return passage_texts(open_corpus(str(corpus), "corpus"), tokenize, PassageConfig())


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()


def main() -> None:
    corpus, folder, rank, size = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    world = World()
    if size > 1:
        place = f"file://{folder.parent}/{folder.name}.meeting"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size)
        world = World(rank=rank, size=size)
    vectors = encoded(folder, world, texts_of(corpus), float(sys.argv[5]))
    queries = vectors[::400].astype(np.float32)
    found = search(queries, vectors, 10, shard_bytes=1 << 20, world=world)
    print(digest(vectors), digest(*found))
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
