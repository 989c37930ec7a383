"""A run folder as training leaves it, without training: a tiny open_clip model and what it is evaluated on."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy, normalize

from dyad.data.image_text.decode import decode
from dyad.train.cli.compose import compose_config
from dyad.train.config import TrainConfig
from dyad.train.losses import build_objective
from dyad.train.run_folder.checkpoint_state import capture
from dyad.train.run_folder.folder import open_run
from dyad.train.run_folder.saving import write_checkpoint
from dyad.train.towers.build import build_image_text
from dyad.train.towers.models import ImageTextModel
from helpers.eval import ROOT

EMOJI = ROOT / "data" / "samples" / "emoji"
TINY = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 64, "layers": 2, "width": 64, "head_width": 32, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


def make_run(folder: Path, *overrides: str, fit: int = 0, val: Path | None = EMOJI / "twemoji-unseen.tar") -> Path:
    """A run of a tiny open_clip model with random weights, its checkpoint at step 7, temperature 0.05."""
    (folder / "tiny.json").write_text(json.dumps(TINY))
    config = compose_config(
        [
            "data=emoji",
            "steps=7",
            f"model.name={folder / 'tiny.json'}",
            f"data.val={val or 'null'}",
            "data.workers=0",
            "objective.temperature=0.05",
            "run.name=tiny",
            f"run.dir={folder / 'runs'}",
            *overrides,
        ]
    )
    run = open_run(config)
    save_checkpoint(run, config, fit=fit)
    return run


def save_checkpoint(run: Path, config: TrainConfig, seed: int = 0, step: int = 7, fit: int = 0) -> Path:
    """Write a checkpoint of random weights, after `fit` quick steps towards telling a few emoji apart."""
    torch.manual_seed(seed)
    model = build_image_text(config.model)
    quick_fit(model, distinct_emoji(120), fit)
    objective = build_objective(config.objective.name, temperature=config.objective.temperature)
    optimizer = torch.optim.AdamW(model.towers.parameters())
    state = capture({"towers": model.towers, "objective": objective}, optimizer, step, {})
    return write_checkpoint(run, state, keep=3)


def quick_fit(model: ImageTextModel, emoji: list[Emoji], steps: int) -> None:
    """Train for some dense steps on half of the emoji, against their names and their groups in turn."""
    images = torch.stack([decode(e.image, 10_000) for e in emoji[::2]])
    texts = [model.tokenize([e.label for e in emoji[::2]]), model.tokenize([e.group for e in emoji[::2]])]
    optimizer = torch.optim.AdamW(model.towers.parameters(), lr=1e-3)
    for step in range(steps):
        x, y = (normalize(e, dim=-1) for e in (model.towers.x_tower(images), model.towers.y_tower(texts[step % 2])))
        same = (texts[step % 2][:, None] == texts[step % 2]).all(-1).float()
        cross_entropy(20 * x @ y.T, same / same.sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()


def small_task(folder: Path, name: str) -> Path:
    """A zero-shot task of EMOJI, of the 181 images of one of its shards and of a few prompts for each class."""
    task = json.loads((EMOJI / name).read_text())
    classes = {label: prompts[:4] for label, prompts in task["classes"].items()}
    (folder / name).write_text(json.dumps(task | {"source": f"{EMOJI}/twemoji-unseen.tar", "classes": classes}))
    return folder / name


@dataclass(frozen=True)
class Emoji:
    key: str
    image: bytes
    label: str
    group: str


def distinct_emoji(count: int) -> list[Emoji]:
    """Emoji of which no two have the same image or text."""
    found: dict[bytes, Emoji] = {}
    texts: set[str] = set()
    for emoji in _emoji(EMOJI / "twemoji-unseen.tar"):
        if emoji.image not in found and emoji.label not in texts:
            found[emoji.image] = emoji
            texts.add(emoji.label)
    assert len(found) >= count
    return list(found.values())[:count]


def _emoji(shard: Path) -> Iterator[Emoji]:
    with tarfile.open(shard) as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    for name, image in members.items():
        if name.endswith(".webp"):
            facts = json.loads(members[name.replace(".webp", ".json")])
            yield Emoji(name, image, facts["caption"], facts["group"])


def write_wds(folder: Path, emoji: list[Emoji], shards: int = 2) -> list[str]:
    """A CLIP_benchmark data set that is both: .txt captions and .cls groups; returns the class names."""
    groups = sorted({e.group for e in emoji})
    (folder / "test").mkdir(parents=True)
    (folder / "test" / "nshards.txt").write_text(str(shards))
    (folder / "classnames.txt").write_text("\n".join(groups))
    (folder / "zeroshot_classification_templates.txt").write_text("{c}\na image of {c}\nemoji: {c}")
    size = -(-len(emoji) // shards)
    for number in range(shards):
        with tarfile.open(folder / "test" / f"{number}.tar", "w") as tar:
            for i, e in enumerate(emoji[number * size : (number + 1) * size], number * size):
                for suffix, content in (
                    ("webp", e.image),
                    ("txt", e.label.encode()),
                    ("cls", str(groups.index(e.group)).encode()),
                ):
                    info = tarfile.TarInfo(f"s{i:07d}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return groups
