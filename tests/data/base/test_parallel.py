"""The map over several processes, in a script of a user."""

import subprocess
import sys
from pathlib import Path

from helpers.cli import ROOT

SCRIPT = """
print("begins")
from dyad.data.base.parallel import parallel_map
with parallel_map(2, 2) as run:
    print(*run(abs, [-1, -2]))
"""


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.stdout == "begins\n1 2\n", done.stderr
