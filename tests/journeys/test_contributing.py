"""The examples of CONTRIBUTING.md: those of each section in a copy of the checkout, as a contributor would do them."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.cli import Commands

ROOT = Path(__file__).parents[2]
SECTIONS = {
    title: re.findall(r"```(python|diff|bash)\n(.*?)```", text, re.DOTALL)
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
}
EXAMPLES = [title for title, blocks in SECTIONS.items() if blocks]


def apply(diff: str, folder: Path) -> None:
    """Apply a diff without line numbers: its lines of context and removal must stand in the file exactly once."""
    name, _, change = diff.partition("\n@@\n")
    path = folder / name.splitlines()[0].removeprefix("--- a/")
    lines = change.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    text = path.read_text()
    assert text.count(before) == 1, f"{path.name} has not once:\n{before}"
    path.write_text(text.replace(before, after))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the code; the shipped data are a link."""
    for name in ("data", "train", "eval", "configs"):
        ignored = shutil.ignore_patterns("samples", "__pycache__", ".index")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copytree(ROOT / "dyad", tmp_path / "dyad", symlinks=True)
    (tmp_path / "data" / "samples").symlink_to(ROOT / "data" / "samples")
    return tmp_path


@pytest.mark.parametrize("section", EXAMPLES)
def test_an_example_works(section: str, checkout: Path, commands: Commands) -> None:
    """Commands of ours run in a process that has the imports, those of changed code in one that has all but ours.

    Reports, a third of the time of a run, are made of the evaluator alone; FLOPs, a tenth, are not counted.
    """
    changed = ["helpers.elsewhere"] * any(kind == "diff" for kind, _ in SECTIONS[section])
    for kind, text in SECTIONS[section]:
        if kind == "python":
            (checkout / text.splitlines()[0].removeprefix("# ")).write_text(text)
        elif kind == "diff":
            apply(text, checkout)
        else:
            for line in text.splitlines():
                ours, _, read = line.partition(" | ") if line.startswith("python -m ") else ("", "", line)
                said = ""
                if ours:
                    words = [*changed, *shlex.split(ours)[2:]]
                    if "debug=smoke" in words and section != "An evaluator":
                        words.append("tracking.report=false")
                    words[:1] = ["faults.observed"] if words[0] == "train" else words[:1]
                    ended = commands.run(*words, cwd=str(checkout), WANDB_MODE="disabled")
                    assert ended.code == 0, f"{line}\n{ended.out}"
                    said = ended.out
                if read:
                    command = ["bash", "-euo", "pipefail", "-c", read]
                    done = subprocess.run(command, cwd=checkout, input=said, capture_output=True, text=True)
                    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def test_every_kind_of_extension_has_an_example() -> None:
    wanted = {"An objective", "A format of question files", "An evaluator", "A tower", "A tracker", "A key"}
    assert wanted <= set(EXAMPLES)
