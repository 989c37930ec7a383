"""Runs through the command line: any number of processes, killed, stopped, started again, started wrongly."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers_cli import ROOT, Commands, Ended

SHARD = ROOT / "data/samples/emoji/fxemoji-trained.tar"
VAL = ROOT / "data/samples/emoji/twemoji-undrawn.tar"
TIMINGS = ("time", "samples_per_second")
QUIET = {"data": "image_text", "data.captions": "[caption]"}  # no augmentation, one caption


@pytest.fixture(scope="module")
def models(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with open_clip.json and a transformers folder bert/, both tiny."""
    folder = tmp_path_factory.mktemp("models")
    vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 32}
    text = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    (folder / "open_clip.json").write_text(json.dumps({"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}))
    made = commands.run("helpers_bert", str(folder / "bert"))
    assert made.code == 0, made.out
    return folder


@pytest.fixture
def tiny(models: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The arguments of a run of seconds, with run folders below tmp_path; keys as they are typed override."""

    def arguments(keys: dict[str, Any]) -> list[str]:
        common = {
            "model": "cnn_minilm",
            "model.image.image_size": 32,
            "model.image.widths": [8, 16],
            "model.embed_dim": 32,
            "model.text.kind": "open_clip",
            "model.text.name": models / "open_clip.json",
            "model.text.context_length": "null",
            "model.text.frozen": "false",
            "data": "emoji",
            "data.train": SHARD,
            "data.val": "null",
            "data.workers": 0,
            "global_batch_size": 32,
            "steps": 6,
            "tracking": "local",
            "tracking.every": 1,
            "run.dir": tmp_path / "runs",
        }
        return ["train", *(f"{key}={value}".replace(", ", ",") for key, value in {**common, **keys}.items())]

    return arguments


def records(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    """The loss of each step; steps are 1, 2, … without gap or repetition."""
    trained = [r for r in records(run) if "train/loss" in r]
    assert [r["step"] for r in trained] == list(range(1, len(trained) + 1))
    return [r["train/loss"] for r in trained]


def without_timings(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in r.items() if not any(t in k for t in TIMINGS)} for r in records(run)]


def state(run: Path) -> dict[str, Any]:
    return json.loads((run / "run_state.json").read_text())


def last_weights(run: Path) -> bytes:
    return (max((run / "checkpoints").glob("step_*")) / "model.safetensors").read_bytes()


def only_run(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def logged(run: Path, step: int) -> bool:
    path = run / "metrics.jsonl"
    return path.exists() and path.read_text().count("\n") >= step


def refused(ended: Ended, code: int, *words: str) -> None:
    """It left with this code and said one thing, in at most 6 lines."""
    assert ended.code == code, ended.out
    assert len(ended.out.splitlines()) <= 6 and ended.out.count("error:") == 1, ended.out
    assert all(word in ended.out for word in words), ended.out


# Any number of processes ---------------------------------------------------------------------------------------------


def test_the_loss_of_every_step_is_that_of_one_process(commands, tiny, tmp_path: Path) -> None:
    def trained(size: int) -> Path:
        keys = {**QUIET, "steps": 50, "global_batch_size": 30, "run.dir": tmp_path / f"{size}"}
        first, *others = commands.world(size, *tiny(keys))
        assert [first.code, *(o.code for o in others)] == [0] * size, first.out
        assert [o.out for o in others] == [""] * (size - 1)
        return only_run(tmp_path / f"{size}")

    one, four = trained(1), trained(4)  # 30 = 8 + 8 + 7 + 7
    assert one.name == four.name
    assert losses(four) == pytest.approx(losses(one), rel=1e-5)
    assert len(losses(one)) == 50


def test_torchrun_stopped_and_gone_on_with(commands, tiny, tmp_path: Path) -> None:
    keys = {**QUIET, "steps": 50, "run.name": "a"}
    launched = launch(tiny(keys)[1:])
    run = tmp_path / "runs" / "a"
    wait_for(lambda: logged(run, 2) or launched.poll() is not None, "no step")
    for torchrun in Path(f"/proc/{launched.pid}/task/{launched.pid}/children").read_text().split():
        for number in (signal.SIGUSR1, signal.SIGTERM):  # a scheduler asks everybody: it is not to die, nor to kill
            os.kill(int(torchrun), number)
    launched.send_signal(signal.SIGTERM)
    out, _ = launched.communicate(timeout=120)
    assert launched.returncode == 75, out
    assert not processes_with(str(run.parent)), "orphans"
    stopped = state(run)
    assert stopped["status"] == "preempted" and 2 <= stopped["step"] < 50
    said = [line for line in out.splitlines() if not line.startswith("Train Epoch")]
    assert said == [
        f"{run}: 50 steps of 32",
        f"Stopped on request at step {stopped['step']}; the same command goes on from there",
        f"preempted at step {stopped['step']}: {run}",
    ]
    assert [e.code for e in commands.world(2, *tiny(keys))] == [0, 0]
    assert commands.run(*tiny({**keys, "run.name": "one"})).code == 0
    assert losses(run) == pytest.approx(losses(run.parent / "one"), rel=1e-5)


def launch(arguments: list[str], *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(ROOT / "launch/torchrun.sh"), *flags, *arguments],
        env={**os.environ, "NPROC": "2", "DYAD_EXTRAS": "demo", "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def processes_with(word: str) -> list[str]:
    """Processes that have `word` on their command line."""
    commands = [p for p in Path("/proc").glob("[0-9]*/cmdline") if p.parent.name != str(os.getpid())]
    return [c for c in map(_read, commands) if word in c]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # gone meanwhile
        return ""


def test_torchrun_dry_run_leaves_the_arguments_as_they_are() -> None:
    arguments = ["data.train='a b/{00..99}.tar'", 'run.name="$x"', "eval.suite=[a,b]"]
    out, _ = launch(arguments, "--dry-run").communicate(timeout=120)
    echoed = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {out.splitlines()[-1]}"], capture_output=True, text=True
    ).stdout
    assert echoed.splitlines()[-5:] == ["-m", "train", *arguments]


def test_torchrun_tells_a_mistake_once(tiny) -> None:
    launched = launch(tiny({"optim.lr": -1})[1:])
    out, _ = launched.communicate(timeout=120)
    refused(Ended(launched.returncode, out), 2, "optim.lr=-1")


def test_a_mistake_that_shows_late_is_told_once_and_leaves_nothing(commands, tiny, tmp_path: Path) -> None:
    code = tmp_path / "code"
    first, second = commands.world(2, *tiny({"model.embed_dim": 64}), DYAD_EXIT_CODE=str(code))
    assert (first.code, second.code, second.out) == (0, 0, "")  # for torchrun; the launch script reads the file
    refused(Ended(int(code.read_text()), first.out), 2, "model.embed_dim")
    assert not (tmp_path / "runs").exists()


# Killed, stopped, started again --------------------------------------------------------------------------------------


def test_killed_three_times_ends_as_if_undisturbed(commands, tiny, models: Path, tmp_path: Path) -> None:
    keys = {
        "model.text.kind": "transformers",
        "model.text.name": models / "bert",
        "model.text.context_length": 32,
        "model.text.frozen": "true",
        "data.workers": 1,
        "steps": 40,
        "checkpoint.every": 5,
        "eval.every": 20,
        "data.val": VAL,
    }
    quiet, killed = tmp_path / "runs" / "quiet", tmp_path / "runs" / "killed"
    undisturbed = commands.run(*tiny({**keys, "run.name": "quiet"}))
    assert undisturbed.code == 0, undisturbed.out
    moments = sorted(random.Random(7).sample(range(2, 38), 3))
    for moment in moments:
        running = commands.start(*tiny({**keys, "run.name": "killed"}))
        wait_for(lambda: logged(killed, moment), f"step {moment}")  # noqa: B023
        os.killpg(running.pid, signal.SIGKILL)
        assert running.wait().code == -signal.SIGKILL
        assert state(killed)["status"] == "running"
    ended = commands.run(*tiny({**keys, "run.name": "killed"}))
    assert ended.code == 0 and "going on at step" in ended.out, ended.out
    assert last_weights(killed) == last_weights(quiet)
    assert without_timings(killed) == without_timings(quiet)
    assert len(losses(killed)) == 40


def test_stopped_by_a_signal_and_what_may_not_change(commands, tiny, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    running = commands.start(*tiny({"run.name": "a", "steps": 1000}))
    wait_for(lambda: logged(run, 3), "step 3")
    refused(commands.run(*tiny({"run.name": "a", "steps": 1000})), 2, "in use by process", "run.name")
    os.kill(running.pid, signal.SIGTERM)
    stopped = running.wait()
    assert stopped.code == 75 and state(run)["status"] == "preempted", stopped.out
    done = state(run)["step"]
    assert (run / "checkpoints" / f"step_{done:08d}").is_dir() and len(losses(run)) == done
    changed = commands.run(*tiny({"run.name": "a", "steps": 1000, "optim.lr": 0.1}))
    refused(changed, 2, "optim.lr: 0.0005 there, 0.1 now", "resume=never")


def test_finished_again_anew_and_from_elsewhere(commands, tiny, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    assert commands.run(*tiny({"run.name": "a", "checkpoint.every": 3})).code == 0
    weights, metrics = last_weights(run), (run / "metrics.jsonl").read_bytes()

    again = commands.run(*tiny({"run.name": "a"}))
    assert (again.code, again.out) == (0, f"already finished: {run}\n")
    (run / "report.html").unlink()  # as if killed after the last step, before its page was made
    (run / "run_state.json").write_text(json.dumps({**state(run), "status": "running"}))
    late = commands.run(*tiny({"run.name": "a", "checkpoint.every": 3}))
    assert late.code == 0 and (run / "report.html").exists() and state(run)["status"] == "finished", late.out
    assert (run / "metrics.jsonl").read_bytes() == metrics

    middle = run / "checkpoints" / "step_00000003"
    from_middle = commands.run(*tiny({"run.name": "b", "resume": middle}))
    assert from_middle.code == 0 and "going on at step 3" in from_middle.out, from_middle.out
    assert last_weights(run.parent / "b") == weights
    assert [r["step"] for r in records(run.parent / "b")] == [4, 5, 6]

    anew = commands.run(*tiny({"run.name": "a", "resume": "never", "seed": 1}))
    assert anew.code == 0 and len(losses(run)) == 6, anew.out
    (aside,) = run.glob("before-*")
    assert last_weights(aside) == weights != last_weights(run)
    assert (aside / "metrics.jsonl").read_bytes() == metrics


def test_init_from_takes_the_weights_and_nothing_else(commands, tiny, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run = tmp_path / "runs" / "a"
    assert commands.run(*tiny({"run.name": "a", "steps": 2})).code == 0
    begun = commands.run(*tiny({"run.name": "b", "init_from": run, "optim.lr": 1e-30, "optim.weight_decay": 0}))
    assert begun.code == 0 and "beginning with the weights of" in begun.out, begun.out
    newest = [max((r / "checkpoints").iterdir()) / "model.safetensors" for r in (run, run.parent / "b")]
    there, here = (load_file(path) for path in newest)
    assert there.keys() == here.keys()
    towers = [name for name in there if name.startswith("towers.") and "running" not in name and "num_b" not in name]
    assert towers and all(there[name].equal(here[name]) for name in towers)
    assert not there["objective.logit_scale"].equal(here["objective.logit_scale"])  # τ is as configured
    assert len(losses(run.parent / "b")) == 6

    other = commands.run(*tiny({"run.name": "c", "init_from": run, "model.image.widths": [8, 8]}))
    refused(other, 2, "init_from=", "of another shape")
    refused(commands.run(*tiny({"init_from": run.parent / "none"})), 2, "init_from=", "no such folder")
    refused(commands.run(*tiny({"resume": "nevr"})), 2, "resume=nevr", "Did you mean 'never'?")


# Data, evaluation, other ways to start -------------------------------------------------------------------------------


def test_changed_and_damaged_data(commands, tiny, tmp_path: Path) -> None:
    shard = tmp_path / "copy.tar"
    shutil.copy(SHARD, shard)
    keys = {"run.name": "a", "data.train": shard, "steps": 1000}
    running = commands.start(*tiny(keys))
    wait_for(lambda: logged(tmp_path / "runs" / "a", 1), "step 1")
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait().code == 75
    shutil.copy(VAL.with_name("noto-v1-trained.tar"), shard)
    refused(commands.run(*tiny(keys)), 2, "another data fingerprint", "init_from")

    shard.write_bytes(SHARD.read_bytes()[:100_000])
    code = tmp_path / "code"
    first, second = commands.world(2, *tiny({"data.train": shard}), DYAD_EXIT_CODE=str(code))
    refused(Ended(int(code.read_text()), first.out), 3, str(shard), "offset")
    assert second.out == ""


def test_data_damaged_behind_our_back_stops_all(commands, tiny, tmp_path: Path) -> None:
    shard = tmp_path / "copy.tar"
    shutil.copy(SHARD, shard)
    assert commands.run(*tiny({"run.name": "a", "data.train": shard, "steps": 1})).code == 0  # has an index now
    stamp = shard.stat().st_mtime_ns
    with shard.open("r+b") as file:
        for offset in range(1000, shard.stat().st_size, 4096):
            file.seek(offset)
            file.write(b"\xff")
    os.utime(shard, ns=(stamp, stamp))
    code = tmp_path / "code"
    ended = commands.world(2, *tiny({"run.name": "b", "data.train": shard}), DYAD_EXIT_CODE=str(code))
    assert code.read_text() == "3" and all(e.code in (3, 4) for e in ended)
    said = "".join(e.out for e in ended)
    assert f"{shard}: sample" in said and "offset" in said and "Traceback" not in said
    assert state(tmp_path / "runs" / "b")["status"] == "failed"


def results(folder: Path) -> dict[str, Any]:
    return {p.name: json.loads(p.read_text())["metrics"] for p in folder.glob("*.json")}


def test_eval_gives_the_numbers_of_the_last_evaluation(commands, tiny, tmp_path: Path) -> None:
    suite = f"[retrieval:{VAL}]"
    run = tmp_path / "runs" / "tiny"
    trained = commands.run(
        *tiny({"run.name": "tiny", "steps": 4, "eval.every": 2, "data.val": VAL, "eval.suite": suite})
    )
    assert trained.code == 0, trained.out
    assert [r["step"] for r in records(run) if "val/image_to_text_R@1" in r] == [2, 4]
    written = results(run / "eval")
    assert len(written) == 2 and "image → text" in trained.out and f"to look at: {run}/report.html" in trained.out
    (cases,) = {len(of) for p in (run / "eval").glob("*.json") for of in json.loads(p.read_text())["gallery"].values()}
    assert cases == 12 and len(list((run / "eval" / "val.pictures").iterdir())) > 12
    last = {k.removeprefix("val/"): v for k, v in records(run)[-1].items() if k.startswith("val/")}
    assert last.items() <= written["val.json"].items()

    again = commands.run("eval", f"checkpoint={run}", f"out={tmp_path / 'again'}", "examples=0")
    assert again.code == 0, again.out
    assert results(tmp_path / "again") == written
    refused(commands.run("eval", f"checkpoint={tmp_path / 'runs' / 'tinny'}"), 2, "no folder", "Did you mean 'tiny'?")
    refused(commands.run("eval", f"checkpont={run}"), 2, "Did you mean 'checkpoint'?")
    (run / "eval").rename(tmp_path / "away")
    (run / "eval").write_text("")
    refused(commands.run("eval", f"checkpoint={run}", "examples=0"), 4, "eval cannot be written: File exists")


@pytest.mark.parametrize("debug", ["smoke", "overfit"])
def test_debug_choices_with_the_emoji_recipe(commands, tmp_path: Path, debug: str) -> None:
    small = ["eval.suite=[]", f"data.val={VAL}", "global_batch_size=16", "tracking=local", f"data.train={SHARD}"]
    ended = commands.run("train", "experiment=emoji", f"debug={debug}", "steps=4", *small, f"run.dir={tmp_path}")
    assert ended.code == 0, ended.out
    assert only_run(tmp_path).name.startswith("emoji-")
    assert not [line for line in ended.out.splitlines() if "oading weights" in line or "arning" in line]


def top_level() -> set[str]:
    """Names in the project's folder, but for what measuring coverage leaves there."""
    return {p.name for p in ROOT.iterdir() if not p.name.startswith(".coverage")}


def test_two_seeds_with_one_command(commands, tiny, tmp_path: Path) -> None:
    before = top_level()
    ended = commands.run(*tiny({"steps": 2, "seed": "0,1"}), "-m")
    assert ended.code == 0, ended.out
    first, second = (p for p in (tmp_path / "runs").iterdir() if p.is_dir())
    assert len(losses(first)) == len(losses(second)) == 2 and losses(first) != losses(second)
    assert top_level() == before
    assert ended.out.count("finished at step 2") == 2
