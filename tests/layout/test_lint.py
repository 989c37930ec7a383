"""Scripts and the Dockerfile are without the mistakes that linters know. The linters are of the environment."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("launch", "tests", "tests/*")


def linted(tool: str, *arguments: str) -> str:
    """What it says; the tool lies beside Python, whether the environment is activated or not."""
    program = Path(sys.executable).parent / tool
    return subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True).stdout


def test_hadolint_has_nothing_to_say(tmp_path: Path) -> None:
    assert linted("hadolint", "Dockerfile") == ""
    (tmp_path / "Dockerfile").write_text("FROM python\n")
    assert "DL3006" in linted("hadolint", str(tmp_path / "Dockerfile"))


def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    scripts = [str(p) for folder in FOLDERS for end in ("sh", "sbatch") for p in ROOT.glob(f"{folder}/*.{end}")]
    assert len(scripts) > 10 and linted("shellcheck", "-x", ".ci/run", *scripts) == ""
    (tmp_path / "bad.sh").write_text("#!/bin/sh\ncd $1\n")
    assert "SC2086" in linted("shellcheck", str(tmp_path / "bad.sh"))
