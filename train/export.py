"""python -m train.export run=runs/x format=open_clip: a trained model as a folder that another library loads.

Nothing is called done before that library has loaded the folder and given the same embeddings as the run itself.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from data import errors
from data.command_line import help_text, parse_options
from data.config import described
from data.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from data.transforms import ImageSpec
    from eval.trained import Trained
    from train.towers import Model


class Format(Enum):
    open_clip = "open_clip"


@dataclass
class ExportCommand:
    """`python -m train.export`: which run, for which library."""

    run: str = described(MISSING, "a run folder (its newest checkpoint) or one checkpoint folder")
    format: Format = described(Format.open_clip, "the library that is to load it: open_clip")
    out: str | None = described(None, "folder to write; null: export/open_clip in the run")


PURPOSE = """\
Write a trained model as a folder that open_clip loads, checked by loading it there and comparing embeddings.
Everything is key=value."""
EXAMPLES = {
    "the newest checkpoint, into the run's own folder": "python -m train.export run=runs/emoji_scratch",
    "one checkpoint, elsewhere": "python -m train.export run=runs/x/checkpoints/step_00001000 out=my_model",
}
WEIGHTS, CHECKPOINT, CONFIG, CARD = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.pt",
    "open_clip_config.json",
    "README.md",
)
TOLERANCE = 1e-5  # of unit embeddings: another order of summation, not another model
OPEN_CLIP_SCALE = math.log(1 / 0.07)  # where open_clip starts
PROBES = ["a red circle", "Grüße aus Köln", "wheel of dharma, religion, Buddhist"]


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text(PURPOSE, EXAMPLES, ExportCommand))
        return
    command = parse_options(ExportCommand, sys.argv[1:], "python -m train.export")

    from eval.trained import find_run, load_trained

    trained = load_trained(*find_run(command.run, note=lambda line: print(line, file=sys.stderr)))
    out = Path(command.out).expanduser() if command.out else trained.run / "export" / command.format.value
    name = trained.run.resolve().name
    difference = export_open_clip(trained.model, trained.logit_scale, out, name=name, card=_card(trained))
    print(f"{out}: step {trained.step}. open_clip loaded it and gave the same embeddings (to {difference:.1g}).\n")
    print(snippet(out, name, trained.model.image))


def export_open_clip(model: Model, logit_scale: float | None, out: Path, *, name: str, card: str) -> float:
    """Write `out`; the largest difference between the embeddings of `model` and of what open_clip loads from there.

    logit_scale: log 1/τ, None to keep open_clip's own. Raises ConfigError when open_clip cannot build such a model,
    or when `out` holds files that are not of an export.
    """
    if model.open_clip_config is None:
        raise ConfigError(
            "format=open_clip: only a model whose two towers are one open_clip model can be exported: "
            "model.name=… with model.image.kind=open_clip and model.text.kind=open_clip"
        )
    out = out.absolute()
    temporary = out.with_name(f".{out.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _write(temporary, model, logit_scale, name, card)
        _refuse_other_files(out, {p.name for p in temporary.iterdir()})
        difference = _difference(temporary, model)
        shutil.rmtree(out, ignore_errors=True)
        os.rename(temporary, out)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return difference


def snippet(folder: Path, name: str, image: ImageSpec) -> str:
    """How to load the folder with open_clip."""
    return f"""\
    import open_clip
    model, _, preprocess = open_clip.create_model_and_transforms("local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer("local-dir:{folder}")

By a model name and the .pt file, which does not know how pictures are prepared:
    open_clip.add_model_config("{folder}")
    model, _, preprocess = open_clip.create_model_and_transforms(
        "{name}", pretrained="{folder / CHECKPOINT}",
        image_mean={list(image.mean)}, image_std={list(image.std)},
        image_interpolation="{image.interpolation}", image_resize_mode="{image.resize}",
    )"""


def _write(folder: Path, model: Model, logit_scale: float | None, name: str, card: str) -> None:
    import torch
    from safetensors.torch import save_file

    from train.towers import open_clip_state_dict

    tensors: dict[str, Tensor] = {k: v.detach().cpu().contiguous() for k, v in open_clip_state_dict(model).items()}
    tensors["logit_scale"] = torch.tensor(OPEN_CLIP_SCALE if logit_scale is None else logit_scale)
    save_file(tensors, folder / WEIGHTS)
    torch.save({"state_dict": tensors}, folder / CHECKPOINT)
    assert model.open_clip_config is not None
    config = model.open_clip_config["model_cfg"]
    whole = {"model_cfg": config, "preprocess_cfg": _preprocess(model.image)}
    (folder / CONFIG).write_text(json.dumps(whole, indent=2) + "\n")
    (folder / f"{name}.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / CARD).write_text(card)
    if config["text_cfg"].get("hf_tokenizer_name"):  # open_clip then looks for its files in the folder
        model.tokenize.tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]


def _preprocess(image: ImageSpec) -> dict[str, Any]:
    return {
        "size": image.size,
        "mean": list(image.mean),
        "std": list(image.std),
        "interpolation": image.interpolation,
        "resize_mode": image.resize,
    }


def _refuse_other_files(out: Path, ours: set[str]) -> None:
    strangers = {p.name for p in out.iterdir()} - ours if out.is_dir() else {out.name} if out.exists() else set()
    if strangers:
        raise ConfigError(f"out={out} exists and holds '{min(strangers)}': choose another folder, or remove it")


def _difference(folder: Path, model: Model) -> float:
    """Largest difference of unit embeddings of a few pictures and texts between `model` and what open_clip loads."""
    import open_clip
    import torch
    import torch.nn.functional as F
    from PIL import Image
    from safetensors.torch import load_file

    exact = load_file(folder / WEIGHTS)
    pickled = torch.load(folder / CHECKPOINT, weights_only=True)["state_dict"]
    assert exact.keys() == pickled.keys() and all(torch.equal(exact[k], pickled[k]) for k in exact)
    library: Any = open_clip  # its own annotations are too wide to be checked
    loaded, _, preprocess = library.create_model_and_transforms(f"local-dir:{folder}")
    tokenize = library.get_tokenizer(f"local-dir:{folder}")
    size = (len(PROBES), 3, model.image.size, model.image.size)
    pictures = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    prepared = torch.stack([preprocess(Image.fromarray(p.permute(1, 2, 0).numpy())) for p in pictures])
    ours, theirs = model.towers.eval(), loaded.eval()
    with torch.no_grad():
        pairs = [
            (ours.x_tower(pictures), theirs.encode_image(prepared)),
            (ours.y_tower(model.tokenize(PROBES)), theirs.encode_text(tokenize(PROBES))),
        ]
    difference = max(float((F.normalize(a, dim=-1) - F.normalize(b, dim=-1)).abs().max()) for a, b in pairs)
    assert difference <= TOLERANCE, f"open_clip gives other embeddings than the run, by up to {difference}"
    return difference


def _card(trained: Trained) -> str:
    """README.md of the folder: what it is, how to load it, what it scored."""
    config, name = trained.config, trained.run.resolve().name
    scores = [json.loads(p.read_text()) for p in sorted((trained.run / "eval").glob("*.json"))]
    shown = "acc1", "image_to_text_R@1", "text_to_image_R@1", "image_to_text_R@10", "text_to_image_R@10"
    same = [s for s in scores if s.get("step") == trained.step]
    rows = [f"| {s['dataset']} | {m} | {s['metrics'][m]:.3f} |" for s in same for m in shown if m in s["metrics"]]
    table = "\n".join(["", "| data set | metric | value |", "|---|---|---|", *rows, ""]) if rows else ""
    return f"""\
---
library_name: open_clip
pipeline_tag: zero-shot-image-classification
tags: [clip]
---
# {name}

CLIP model trained by Dyad: {trained.step} steps of {config.global_batch_size} pairs, objective {config.objective.name},
data `{config.data.train}`.
{table}
{snippet(Path("THIS_FOLDER"), name, trained.model.image)}
"""


if __name__ == "__main__":
    errors.run(main)
