"""What a model of sequences does not import: two seconds, as much as torch itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from helpers.cli import ROOT

SLOW = ("torch._dynamo", "torch.distributed.tensor", "torchvision", "transformers", "open_clip", "sympy")


def recommends_without_slow_imports(model: Path, item: str) -> None:
    """A fresh process loads the run or export and recommends; only libraries of other models need the modules SLOW."""
    load = f"import sys, dyad; hits = dyad.load({str(model)!r}).recommend([[{item!r}]], k=2)"
    code = f"{load}; print(len(hits[0]), [name for name in {SLOW} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "2 []\n", done
