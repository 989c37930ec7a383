"""What each objective learns on the emoji in about a minute: python -m tests.benchmarks.objectives [name …]

Every row is one whole run of `python -m train experiment=emoji objective=…` on two cores: the recipe of CLIP, with the
learning rate and the few options that stand below, and the held-out vendor's images ranked against all its captions.
It shows that each objective trains through the whole program, and how the estimators do in small batches. It does not
rank the objectives: nothing was tuned but what stands in RECIPES, and a minute is short.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = {256: 100, 64: 350, 512: 60}  # about a minute each
RECIPES = {
    "clip": "",
    "clip_emoji": "",
    "symmetric_dpm": "temperature=0.05",
    "gcl": "temperature=0.05",
    "one_sided_dpm": "temperature=0.05",
    "coce": "divergence=kl temperature=0.05",
    "coce_chi2": "divergence=chi2 temperature=0.1",
    "coce_cvar": "divergence=cvar alpha=0.3 directions=sum",
    "siglip": "temperature=0.05 init_bias=null",
    "local_nce": "temperature=0.05",
    "nce": "temperature=0.05",
    "spectral": "",
    "pca_penalty": "penalty=0.1",
    "vicreg": "",
    "sogclr": "temperature=0.05",
    "isogclr": "temperature=0.05",
    "fastclip_v3": "temperature=0.05",
    "nuclr": "temperature=0.05",
}


def command(recipe: str, batch: int, seed: int, runs: str) -> list[str]:
    name = recipe if recipe == "clip_emoji" else recipe.split("_")[0] if recipe.startswith("coce") else recipe
    options = [f"objective.{option}" for option in RECIPES[recipe].split()]
    words = [f"objective={name}", *options, f"steps={STEPS[batch]}", f"global_batch_size={batch}", f"seed={seed}"]
    quiet = ["tracking=local", "eval.suite=[]", "checkpoint.every=100000", f"run.dir={runs}"]
    return [sys.executable, "-m", "train", "experiment=emoji", *words, *quiet]


def measure(recipe: str, batch: int, seed: int) -> str:
    with tempfile.TemporaryDirectory() as runs:
        start = time.monotonic()
        run = subprocess.run(command(recipe, batch, seed, runs), cwd=ROOT, capture_output=True, text=True)
        seconds = time.monotonic() - start
        if run.returncode:
            return f"| {recipe} | {batch} | {seed} | exit {run.returncode}: {run.stderr.strip()[-200:]} | | |"
        (found,) = Path(runs).glob("*/eval/*.json")
        metrics = json.loads(found.read_text())["metrics"]
    cells = [f"{metrics[f'text_to_image_R@{k}']:.3f} / {metrics[f'image_to_text_R@{k}']:.3f}" for k in (1, 10)]
    return f"| {recipe} | {batch} | {seed} | {STEPS[batch]} | {' | '.join(cells)} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(RECIPES), help="which (default all)")
    parser.add_argument("--batch", type=int, default=256, choices=STEPS, help="pairs per step (default 256)")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds (default 1)")
    arguments = parser.parse_args()
    print("| objective | batch | seed | steps | R@1 text→image / image→text | R@10 | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.names:
        for seed in range(arguments.seeds):
            print(measure(name, arguments.batch, seed), flush=True)


if __name__ == "__main__":
    main()
