"""The Dockerfile, what travels to its builder, and the entry point's words, which a checkout takes as well.

The steps themselves are executed by `bash tests/docker/run.sh`, which takes half an hour and needs root.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.messages import raises

from tests.docker.steps import context, expanded, read_steps

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
KEPT_OUT = """.git/config .venv/bin/python .ci/run tests/conftest.py runs/own/config.yaml outputs/log.txt shards/000.tar
wandb/run.wandb .env secrets.txt train/__pycache__/step.pyc data/samples/emoji/.index/a.json
.dockerignore Dockerfile""".split()
TAKEN = """train/step/step.py train/losses/options/clip.py data/samples/emoji/groups.json configs/train.yaml
launch/setup.sh requirements.lock requirements.hashes NOTICE""".split()


def test_the_base_is_pinned_to_its_bytes() -> None:
    base = next(step for step in read_steps(DOCKERFILE) if step.word == "ARG").pairs({})["BASE"]
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)


def test_what_is_copied_is_there() -> None:
    """From the context, or made by an earlier step: and the dependencies come before the source."""
    sent = context(ROOT)
    copies = [step for step in read_steps(DOCKERFILE) if step.word == "COPY" and "from" not in step.flags]
    sources = [Path(source) for step in copies for source in step.listed()[:-1]]
    assert sources[:3] == list(map(Path, ("pyproject.toml", "requirements.lock", "requirements.hashes")))
    assert sources[-1] == Path(".")
    for source in sources:
        assert any(path.is_relative_to(source) for path in sent), source


def test_every_pin_has_its_hashes() -> None:
    """launch/lock.sh writes both files: the same versions, markers aside, and a hash for each."""
    pins, hashed = ((ROOT / f"requirements.{name}").read_text().split("\n", 1)[1] for name in ("lock", "hashes"))
    entries = re.split(r"\n(?=\S)", hashed.strip())
    assert all(re.search(r"^\S+==\S+[^\n]*( \\\n    --hash=sha256:[0-9a-f]{64})+$", entry) for entry in entries)
    assert {entry.split()[0] for entry in entries} == {line.split()[0] for line in pins.splitlines()}
    assert sum(entry.startswith("pip==") for entry in entries) == 1, "launch/setup.sh installs with it"


def test_the_image_runs_as_nobody_in_particular() -> None:
    steps = read_steps(DOCKERFILE)
    last = max(i for i, step in enumerate(steps) if step.word == "FROM")
    user, entry = ([s for s in steps[last:] if s.word == word] for word in ("USER", "ENTRYPOINT"))
    assert [s.text for s in user] == ["1000:1000"] and entry[0].listed()[0] == "tini"
    made = "".join(step.text for step in steps[last:] if step.word == "RUN")
    for folder in ("/cache", "runs"):
        assert re.search(rf"install -d -m 1777 .*{folder}", made)


def test_the_context_is_what_is_needed_and_no_more(tmp_path: Path) -> None:
    for name in (*KEPT_OUT, *TAKEN):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    shutil.copy(ROOT / ".dockerignore", tmp_path)
    assert context(tmp_path) == sorted(map(Path, TAKEN))


def test_what_is_shipped_travels() -> None:
    """All modules, all of configs/, and of the samples the two that are shipped."""
    sent = set(context(ROOT))
    assert {p.relative_to(ROOT) for d in ("data", "eval", "train") for p in (ROOT / d).glob("*.py")} <= sent
    assert {p.relative_to(ROOT) for p in (ROOT / "configs").rglob("*.*")} <= sent
    samples = {path.parts[2] for path in sent if path.parts[:2] == ("data", "samples")}
    assert samples == {"emoji", "topics"}


def test_the_reader_of_steps(tmp_path: Path) -> None:
    """As the Dockerfile reference has it; what it does not know is refused."""
    file = tmp_path / "Dockerfile"
    file.write_text(
        'ARG A=1\n# a\nFROM x${A} AS y\nRUN --mount=type=cache,target=/c a \\\n  # between\n && b\nLABEL k="v $A" l='
    )
    argument, stage, run, label = read_steps(file)
    assert (argument.pairs({}), expanded(stage.text, {"A": "1"})) == ({"A": "1"}, "x1 AS y")
    assert (run.flags, run.text) == ({"mount": "type=cache,target=/c"}, "a && b")
    assert label.pairs({"A": "1"}) == {"k": "v 1", "l": ""}
    for text in ("ADD a b", "RUN <<EOF"):
        file.write_text(text)
        with raises(ValueError):
            read_steps(file)


WORDS = {
    "train --help": "Train a dual encoder",
    "eval --help": "python -m eval checkpoint=",
    "data --help": "python -m data",
    "eval.mine --help": "python -m eval.mine run=",
    "doctor --help": "python -m train.doctor",
    "torchrun --dry-run experiment=emoji": "train.distributed.agent",
}


@pytest.mark.parametrize("words", WORDS)
def test_the_words_of_the_entry_point(words: str) -> None:
    done = enter(words)
    assert done.returncode == 0 and WORDS[words] in done.stdout, done.stderr


@pytest.mark.parametrize("words", ["", "trian", "--help"])
def test_other_words_are_refused_before_anything_is_set_up(words: str) -> None:
    done = enter(words, DYAD_PYTHON="/nowhere")
    assert done.returncode == 2 and "train, eval, data, doctor, torchrun" in done.stderr


def test_a_mistake_keeps_its_exit_code() -> None:
    done = enter("train stepz=3")
    assert done.returncode == 2 and "stepz" in done.stderr


def enter(words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "launch/entrypoint.sh", *words.split()]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def test_what_no_quick_suite_runs_is_run_by_cluster_and_records_its_pass(tmp_path: Path) -> None:
    scripts, checkout = ("tests/cluster/run.sh", "tests/docker/run.sh"), tmp_path / "checkout"
    (checkout / "tests").mkdir(parents=True)
    shutil.copy(ROOT / "tests/LAST_PASS.md", checkout / "tests")
    commands = "git init -q && git add . && git -c user.name=a -c user.email=a@b commit -q -m a"
    commands += f" && source {ROOT}/tests/record.sh && SECONDS=77"
    for script in scripts:
        assert re.search(rf"\bbash {script}\s", (ROOT / "launch/test.sh").read_text())
        assert "\nsource tests/record.sh\n" in (ROOT / script).read_text()
        commands += f" && record {script} '{script} and all'"
    subprocess.run(["bash", "-ec", commands], cwd=checkout, check=True)
    lines = [line for line in (checkout / "tests/LAST_PASS.md").read_text().splitlines() if "/run.sh` |" in line]
    for script, line in zip(scripts, lines, strict=True):
        told = rf"\| `{script}` \| \d{{4}}-\d\d-\d\d \| [0-9a-f]{{10}} \| 7\d s \| {script} and all \|"
        assert re.fullmatch(told, line), line
