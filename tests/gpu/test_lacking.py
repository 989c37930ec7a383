"""tests/gpu.sh on a machine that has torch, NumPy and pytest alone: what does not run is listed, and the rest runs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A GPU that is asked for and not used, and none of our packages
MACHINE = """
import sys, torch

LACKING = "accelerate faiss hydra omegaconf open_clip psutil pydantic transformers yaml".split()

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LACKING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Lacking())
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
"""


def test_files_without_their_packages_are_listed_and_others_collected(tmp_path: Path) -> None:
    """The first file is beside a conftest that imported packages."""
    (tmp_path / "machine.py").write_text(MACHINE)
    files = ["tests/faults/test_gpu_start.py", "tests/gpu/test_objectives.py", "tests/train/monitor/test_postmortem.py"]
    plugins = ["-p", "machine", "-p", "gpu.plugin"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-m", "gpu", "-rs", "--collect-only", *files],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT}/tests", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/faults/test_gpu_start.py:0: needs yaml" in done.stdout
    assert "tests/gpu/test_objectives.py:0: needs omegaconf" in done.stdout
    assert "test_postmortem.py::test_out_of_memory_leaves_the_allocations" in done.stdout
