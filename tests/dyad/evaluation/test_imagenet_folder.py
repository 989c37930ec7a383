"""imagenet:FOLDER of the suite, beside open_clip's formula on the same folders."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from helpers.runs import distinct_emoji, make_run
from open_clip import zero_shot_metadata
from torch.nn.functional import normalize

from dyad.data.image_text.decode import decode
from dyad.evaluation.load_run import find_run, load_run
from dyad.evaluation.main import main

NAMES = {"val": [f"n{7 * i:08}" for i in range(1000)], "v2": [str(i) for i in range(1000)]}  # folder → class folders


def test_accuracies_are_those_of_open_clip(tmp_path: Path, monkeypatch) -> None:
    """The class folder of each picture is that of its 1st, 3rd or 700th class by open_clip's formula."""
    templates = [lambda c: f"a {c}.", lambda c: f"{c} at night"]
    monkeypatch.setattr(zero_shot_metadata, "OPENAI_IMAGENET_TEMPLATES", templates)
    emoji, run = distinct_emoji(6), make_run(tmp_path, val=None)
    model = load_run(*find_run(str(run))).model
    with torch.no_grad():
        texts = model.tokenize([t(c) for c in zero_shot_metadata.IMAGENET_CLASSNAMES for t in templates])
        weights = normalize(normalize(model.towers.y_tower(texts), dim=-1).reshape(1000, 2, -1).mean(1), dim=-1)
        x = model.towers.x_tower(torch.stack([decode(e.image, 10_000) for e in emoji]))
    order = np.argsort(-(x @ weights.T).numpy(), axis=1)
    for name, folders in NAMES.items():
        for folder in folders:
            (tmp_path / name / folder).mkdir(parents=True)
        for number, place in enumerate((0, 0, 2, 3, 699, 699)):
            (tmp_path / name / folders[order[number, place]] / f"{number}.webp").write_bytes(emoji[number].image)
    suite = f"suite=[imagenet:{tmp_path}/val,imagenet:{tmp_path}/v2/]"
    of_training = ["columns=[filepath,title]", "image_key=img.png"]  # they say nothing about these folders
    monkeypatch.setattr(
        sys, "argv", ["eval", f"checkpoint={run}", suite, f"out={tmp_path}/out", "examples=0", *of_training]
    )
    main()
    for name in NAMES:
        result = json.loads((tmp_path / "out" / f"imagenet-{name}.json").read_text())
        metrics = result["metrics"]
        assert (metrics["acc1"], metrics["acc5"], metrics["num_samples"]) == (2 / 6, 4 / 6, 6)
        assert result["per_class"]["missile (657)"]["num_samples"] == 0 and len(result["per_class"]) == 1000
