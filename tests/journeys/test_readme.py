"""Each `bash` command of README.md and docs/ is run in a copy of the checkout made of links, with few steps and verses.

tests/layout/test_documents.py composes the others.

What is trained or planned from nothing has a tiny model: 151 million weights of ViT-B-32 take a minute to make, save
and check. So has what is trained from MiniLM, but for the demo. Evaluations of emoji have 40 images.
"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from helpers.checkout import link, write_few_images, write_few_topics
from helpers.cli import Commands, Ended
from helpers.documents import run_commands

ROOT = Path(__file__).parents[2]
SHORT = "steps=2 global_batch_size=16 eval.block=16 tracking.wandb=disabled"
EMOJI = "data.val=few.tar eval.suite=[]"
COMMANDS = run_commands()


def shortened(command: str) -> str:
    """The command as shown, trained for two steps only; a job for a cluster is only written out."""
    if "plan.gpus=64" in command:
        return command.replace("model.name=ViT-L-14", "model.name=tiny.json")
    if "zero_shot:" in command:
        return command.replace("data/samples/emoji/subgroups.json", "few.json")
    if command.startswith("python -m eval model="):
        return f"{command} block=16"
    if command.startswith("sbatch "):
        return f"bash launch/slurm.sbatch --dry-run {command.partition('launch/slurm.sbatch ')[2]}"
    if re.search(r"python -m train |launch/(demo|torchrun)\.sh", command) and "--help" not in command.split():
        without = " ".join(w for w in command.split() if w.partition("=")[0] not in ("steps", "global_batch_size"))
        without = without.replace("model.name=ViT-B-32", "model.name=tiny.json")
        without += " tracking.report=false" * ("demo.sh" not in command)  # a third of the time of most
        if re.search(r"experiment=(emoji|slip_emoji|topics|topics_mined)( |$)", command):
            without += " model.text.name=bert"
        without += " data.rare_per_batch=8" * ("rare_class" in command)  # of a batch of 32
        return f"{without} {SHORT} {EMOJI if re.search('emoji|rare_class|demo.sh', command) else ''}"
    return command


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    link(ROOT, folder, without=(".git", ".venv", "runs", "shards", "data"))
    link(ROOT / "data", folder / "data", without=("samples",))
    link(ROOT / "data/samples", folder / "data/samples", without=("topics",))
    write_few_topics(folder / "data/samples/topics", verses=60)
    (folder / "tiny.json").symlink_to(models / "open_clip.json")
    (folder / "bert").symlink_to(models / "bert")
    write_few_images(folder / "few.tar")
    task = json.loads((ROOT / "data/samples/emoji/subgroups.json").read_text())
    (folder / "few.json").write_text(json.dumps({**task, "source": "few.tar"}))
    from dyad.data.shards.shards import open_shards
    from dyad.data.shards.sources import parse_sources

    images = folder / "my_pictures"
    images.mkdir()
    shards = open_shards(parse_sources(str(ROOT / "data/samples/emoji/fxemoji-trained.tar")))
    for sample_id in range(48):
        (images / f"{sample_id}.webp").write_bytes(shards.read(sample_id)["webp"])
        (images / f"{sample_id}.txt").write_text(f"image number {sample_id}")
    return folder


def test_the_readme_has_commands() -> None:
    assert {"bash launch/demo.sh", "python -m train experiment=topics run.name=topics"} <= {*COMMANDS}
    assert len(COMMANDS) >= 30


OBJECTIVES_ALONE = re.findall(r"```python\n(import torch\n.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("code", OBJECTIVES_ALONE, ids=["loop", "state"])
def test_the_objectives_alone_run(code: str, commands: Commands, tmp_path: Path) -> None:
    """As shown: alone, and on two ranks that share a batch."""
    (tmp_path / "alone.py").write_text(code)
    # torch.distributed.nn before the group, and the group ended: else the process may abort, see distributed/world.py
    start = "import torch.distributed as dist\nimport torch.distributed.nn\ndist.init_process_group('gloo')"
    (tmp_path / "shared.py").write_text(f"{start}\n{code}\ndist.destroy_process_group()\n")
    for name, size in (("alone", 1), ("shared", 2)):
        for ended in commands.world(size, "helpers.elsewhere", name, cwd=str(tmp_path)):
            assert ended.code == 0, ended.out[:3000]


def test_every_command_of_the_readme_works(checkout: Path, commands: Commands) -> None:
    """Commands of ours, also those that xargs makes, run in a process that has the imports; other lines in bash."""
    for command in map(shortened, COMMANDS):
        first, _, fed = command.partition(" | ")
        if re.fullmatch("python -m [^|&;$]+", first):
            done = [run(commands, shlex.split(first), checkout)]
            if fed:
                done += [run(commands, words, checkout) for words in started(fed, done[0].out, checkout)]
        else:
            line = ["bash", "-c", command]  # each sources launch/setup.sh itself
            environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
            ended = subprocess.run(line, cwd=checkout, env=environment, capture_output=True, text=True, timeout=600)
            done = [Ended(ended.returncode, f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}")]
        assert len(done) != 2 or not fed, f"{command}: one run is no sweep"
        for ended in done:
            assert ended.code == 0 and "Traceback" not in ended.out, f"{command}\n{ended.out}"
    (code,) = re.findall(r"```python\n(import dyad\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (checkout / "shown.py").write_text(code)  # of the run `mine` that the commands have made
    ended = commands.run("helpers.elsewhere", "shown", cwd=str(checkout))
    assert ended.code == 0 and "image_to_text_R@1" in ended.out, ended.out


def run(commands: Commands, words: list[str], folder: Path) -> Ended:
    """python -m MODULE …; only what launch/ starts counts FLOPs, see faults.lean.

    Exports are loaded where they are made, see helpers.export: tests/dyad/export/ has one of each in its own process.
    """
    module = {"train": "faults.observed", "train.export": "helpers.export"}.get(words[2], words[2])
    return commands.run(module, *words[3:], cwd=str(folder), HF_HUB_OFFLINE="1")


def started(command: str, lines: str, folder: Path) -> list[list[str]]:
    """The commands that `xargs … python …` starts: a `python` before the real one in PATH writes down its words."""
    (folder / "noted").mkdir()
    python = folder / "noted" / "python"
    python.write_text("#!/usr/bin/env bash\nprintf '%s\n' \"python ${*@Q}\"\n")
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], input=lines, env=environment, capture_output=True, text=True, check=True
    )
    return [shlex.split(line) for line in done.stdout.splitlines()]
