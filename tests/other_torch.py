"""Two environments train the same: python -m tests.other_torch PYTHON OTHER_PYTHON, as launch/lowest.sh does.

Two processes with compiled towers, with ddp and with fsdp2: a run that one began and the other went on with has the
losses, to 1e-5, of the run that the first makes alone; so both compute the same. Five minutes on two idle cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers.tiny_runs import losses, tiny_arguments

ROOT = Path(__file__).parent.parent
STEPS, BEGUN = 6, 3
VIT = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
NOT_OURS = ("model.image.", "model.text.", "model.embed_dim=")  # of the tiny towers


def train(python: str, folder: Path, name: str, dist: str, steps: int) -> list[float]:
    """Go on with the run `name` of the folder, or begin it, until it has `steps` steps; return the losses of all."""
    keys = {"model": "open_clip", "model.name": folder / "open_clip.json", "compile": "true"}
    keys |= {"run.name": name, "dist": dist, "steps": steps, "optim.schedule": "const", "optim.warmup": 0}
    words = [word for word in tiny_arguments(folder, folder / "runs", keys) if not word.startswith(NOT_OURS)]
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "dyad"]
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *words],
        cwd=folder,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(folder / "runs" / name)


def main() -> None:
    one, other = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "open_clip.json").write_text(json.dumps(VIT))
        for dist in ("ddp", "fsdp2"):
            wanted = train(one, folder, f"{dist}-one", dist, STEPS)
            found: dict[str, list[float]] = {}
            for what, (first, second) in {"begun by the one": (one, other), "begun by the other": (other, one)}.items():
                train(first, folder, f"{dist} {what}".replace(" ", "-"), dist, BEGUN)
                found[what] = train(second, folder, f"{dist} {what}".replace(" ", "-"), dist, STEPS)
            for what, values in found.items():
                apart = max(abs(a - b) for a, b in zip(values, wanted, strict=True))
                print(f"{dist}, {what}: {len(values)} losses, at most {apart:.1e} apart", flush=True)
                assert apart <= 1e-5, (values, wanted)


if __name__ == "__main__":
    main()
