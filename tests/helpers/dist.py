"""Starting a job of several processes from a test."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(script: str, world_size: int, *arguments: str) -> None:
    """Run tests/jobs/`script` in `world_size` processes; each prints a line when all its checks hold."""
    assert printed(script, world_size, *arguments).count("all checks hold") == world_size


def printed(script: str, world_size: int, *arguments: str) -> str:
    """Run tests/jobs/`script` in `world_size` processes; return what they print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    run = subprocess.run(
        [*command, str(ROOT / "tests" / "jobs" / script), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout
