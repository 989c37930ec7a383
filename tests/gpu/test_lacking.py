"""tests/gpu.sh on a machine that has torch and no package for our commands: what does not run is listed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests" / "gpu" / "stand_in"  # of omegaconf, by gpu.sh
# A GPU that is asked for and not used, and none of our packages
MACHINE = """
import importlib.util, sys, torch

LACKING = "faiss hydra open_clip pydantic simplejpeg webdataset".split()

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LACKING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Lacking())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in LACKING else find_spec(name, *rest)
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
"""


def test_files_without_their_packages_are_listed_and_others_collected(tmp_path: Path) -> None:
    (tmp_path / "machine.py").write_text(MACHINE)
    files = ["tests/faults/test_gpu_start.py", "tests/journeys/test_slurm.py", "tests/gpu", "tests/train/losses/sums"]
    plugins = ["-p", "machine", "-p", "gpu.plugin"]
    path = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "tests", STAND_IN)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-m", "gpu", "-rs", "--collect-only", *files],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/journeys/test_slurm.py:0: needs hydra" in done.stdout
    for test in ("is_that_of_float64", "time_of_a_loss", "the_host_waits_once", "exact_search", "::test_compiled"):
        assert test in done.stdout


OPTIONS = """
from dyad.train.losses.options.registry import OBJECTIVES, configure
for name in OBJECTIVES:
    print(configure(name, **({"width": 8} if name == "cpc" else {})))
print(configure("clip", temperature=0.5, similarity="dot"), configure("siglip", duplicates="positive", init_scale=10.0))
"""


def test_objectives_are_configured_without_omegaconf() -> None:
    said = []
    for first in ([], [str(STAND_IN)]):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*first, str(ROOT)])}
        command = [sys.executable, "-c", OPTIONS]
        said.append(
            subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        )
    assert said[0] == said[1] and "Similarity.dot" in said[0]


IMPORTS = """
def test_of_a_package():
    import no_such_package
def test_that_fails():
    try:
        import no_such_package
    except ModuleNotFoundError:
        raise AssertionError("a failure")
"""


def test_a_test_that_imports_a_missing_package_is_not_run(tmp_path: Path) -> None:
    """One that fails for another reason fails."""
    (tmp_path / "test_imports.py").write_text(IMPORTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "gpu.plugin", "-p", "no:cacheprovider", "-rs", "test_imports.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert "1 failed, 1 skipped" in done.stdout and "needs no_such_package" in done.stdout, done.stdout
