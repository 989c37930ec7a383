"""Pairs (x, y) of a known density p(y|x) over a small catalogue, towers that are tables, and the density they learn.

x is an image of one colour, y a caption "item N". So log u(x, y) = s/τ + bias is a free table of low rank, and the sum
over all y is log Z.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from helpers.shards import image, write_tar

TABLES = """
import torch
from dyad.data.image_text.transforms import ImageSpec
from dyad.plugins import register_image_tower, register_text_tower
from dyad.train.towers.tower import Tower
from torch import nn


class OfImage(nn.Embedding):
    def forward(self, pixels):
        return super().forward((pixels[:, 2, 0, 0] * 127.5 + 127.5).round().long())  # blue: see helpers/shards.py


class OfCaption(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens[:, 0])


def numbers(texts):
    return torch.tensor([[int(text.split()[-1]) if text[-1:].isdigit() else 0] for text in texts])


def table(kind, rows, width):
    made = kind(rows, width)
    nn.init.normal_(made.weight, std=0.3)
    return made


def images(context):
    return table(OfImage, 256, context.config.embed_dim), nn.Identity(), ImageSpec(4, (0.5,) * 3, (0.5,) * 3)


def captions(context):
    return Tower(table(OfCaption, 1000, context.config.embed_dim), nn.Identity()), numbers


register_image_tower("table", images)
register_text_tower("table", captions)
"""


@dataclass(frozen=True)
class Density:
    """A known density, with pairs drawn from it. p_XN: p(y|x) of N items for each of X contexts.

    folder: has the pairs, pairs.tar, and the plugin with the towers, tables.py.
    """

    p_XN: np.ndarray
    folder: Path

    @staticmethod
    def write(folder: Path, contexts: int, items: int, rows: int, seed: int = 0) -> Density:
        """Write the files, with about `rows` pairs of each context; the density, a skewed one, is that of the pairs."""
        p_XN = np.random.default_rng(seed).dirichlet(np.full(items, 0.7), contexts)
        counts = np.maximum(np.round(p_XN * rows), 1).astype(int)
        pairs = [(x, y) for x in range(contexts) for y in range(items) for _ in range(counts[x, y])]
        members = []
        for n, (x, y) in enumerate(pairs):
            members += [(f"{n:06d}.png", image(x, (4, 4))), (f"{n:06d}.txt", f"item {y}".encode())]
        write_tar(folder / "pairs.tar", members)
        (folder / "tables.py").write_text(TABLES)
        return Density(counts / counts.sum(1, keepdims=True), folder)

    def arguments(self, *more: str) -> list[str]:
        """`train` and its arguments for a run by NCE; of a key that is there twice the last counts."""
        common = f"""
        plugins=[{self.folder / "tables.py"}] model=cnn_minilm model.image.kind=table model.text.kind=table
        model.embed_dim=16 model.text.context_length=null model.text.frozen=false model.text.name=null
        data.train={self.folder / "pairs.tar"} data.val=null data.workers=0 data.bad_samples=stop
        objective=nce objective.similarity=dot objective.temperature=1 objective.learnable=false
        optim.lr=0.05 optim.weight_decay=0 optim.warmup=0 eval.suite=[]
        tracking=local tracking.report=false run.dir={self.folder / "runs"}
        """
        words = {word.partition("=")[0]: word for word in (*common.split(), *more)}
        return ["train", *words.values()]

    def learnt(self, run: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (total variation of p(y|x) and u/Z, log Z) of each context, (X,) each, by the newest checkpoint."""
        last = max((self.folder / "runs" / run / "checkpoints").glob("step_*"))
        weights = load_file(last / "model.safetensors")
        x_XD, y_ND = (weights[f"towers.{side}_tower.trunk.weight"] for side in "xy")
        contexts, items = self.p_XN.shape
        log_u = (x_XD[:contexts] @ y_ND[:items].T).astype(np.float64) + weights["objective.bias"]
        log_z = np.logaddexp.reduce(log_u, axis=1)
        return np.abs(np.exp(log_u - log_z[:, None]) - self.p_XN).sum(1) / 2, log_z
