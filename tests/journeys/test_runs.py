"""Runs through the command line: any number of processes, killed, stopped, started again, started wrongly."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.checkout import write_few_images
from helpers.cli import ROOT, Ended
from helpers.tiny_runs import (
    QUIET,
    SHARD,
    VAL,
    last_weights,
    logged,
    losses,
    only_run,
    records,
    refused,
    state,
    wait_for,
)

# Any number of processes ---------------------------------------------------------------------------------------------


def test_the_loss_of_every_step_is_that_of_one_process(commands, tiny, tmp_path: Path) -> None:
    few = write_few_images(tmp_path / "few.tar")

    def trained(size: int) -> Path:
        keys = {**QUIET, "data.train": few, "steps": 4, "global_batch_size": 16, "run.dir": tmp_path / f"{size}"}
        first, *others = commands.world(size, *tiny(keys))
        assert [first.code, *(o.code for o in others)] == [0] * size, first.out
        assert [o.out for o in others] == [""] * (size - 1)
        return only_run(tmp_path / f"{size}")

    one, three = trained(1), trained(3)  # 16 = 6 + 5 + 5
    assert one.name == three.name
    assert losses(three) == pytest.approx(losses(one), rel=1e-5)
    assert len(losses(one)) == 4  # of 2 in an epoch


def test_a_run_of_a_sweep_is_the_run_alone(commands, tiny, tmp_path: Path) -> None:
    before = top_level()
    words = tiny({**QUIET, "steps": 2, "run.dir": tmp_path / "swept"})
    for said, times in (("-m: seed=1\n", 1), ("already finished", 2)):
        swept = commands.run(*words, "-m", "seed=0,1")
        assert swept.code == 0 and swept.out.count(said) == times, swept.out
        assert swept.out.count("finished at step 2") == 2 * (times == 1)
    assert top_level() == before
    ended = commands.run(*tiny({**QUIET, "steps": 2, "seed": 1}))
    assert ended.code == 0 and "-m: " not in ended.out, ended.out
    alone = only_run(tmp_path / "runs")
    (other,) = (run for run in (tmp_path / "swept").iterdir() if run.name != alone.name)
    assert losses(tmp_path / "swept" / alone.name) == losses(alone)
    assert len(losses(other)) == 2 and losses(other) != losses(alone)


def top_level() -> set[str]:
    """Names in the project's folder, but for what measuring coverage leaves there."""
    return {p.name for p in ROOT.iterdir() if not p.name.startswith(".coverage")}


def test_torchrun_stopped_and_gone_on_with(commands, tiny, tmp_path: Path) -> None:
    keys = {**QUIET, "steps": 10_000, "run.name": "a", "optim.schedule": "const"}
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
    assert stopped["status"] == "preempted" and 2 <= stopped["step"] < 10_000
    said = [line for line in out.splitlines() if not line.startswith("Train Epoch")]
    assert said == [
        "2 processes on CPU, gloo, fp32, 0 loader workers each",
        f"{run}: 10000 steps of 32",
        f"Stopped on request at step {stopped['step']}",
        f"preempted at step {stopped['step']}: {run}; the same command goes on from there",
    ]
    keys["steps"] = stopped["step"] + 5
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


@pytest.mark.parametrize("place", [0, 1, 3])
def test_torchrun_dry_run_leaves_the_arguments_as_they_are(place: int) -> None:
    arguments = ["data.train='a b/{00..99}.tar'", 'run.name="$x"', "eval.suite=[a,b]"]
    out, _ = launch([*arguments[:place], "--dry-run", *arguments[place:]]).communicate(timeout=120)
    echoed = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {out.splitlines()[-1]}"], capture_output=True, text=True
    ).stdout
    assert echoed.splitlines()[-5:] == ["-m", "train", *arguments]


def test_torchrun_tells_a_mistake_once(tiny) -> None:
    launched = launch(tiny({"optim.lr": -1})[1:])
    out, _ = launched.communicate(timeout=120)
    refused(Ended(launched.returncode, out), 2, "optim.lr=-1.0")


def test_a_mistake_that_shows_late_is_told_once_and_leaves_nothing(commands, tiny, tmp_path: Path) -> None:
    code = tmp_path / "code"
    first, second = commands.world(2, *tiny({"model.embed_dim": 64}), DYAD_EXIT_CODE=str(code))
    assert (first.code, second.code, second.out) == (0, 0, "")  # for torchrun; the launch script reads the file
    refused(Ended(int(code.read_text()), first.out), 2, "model.embed_dim")
    assert not (tmp_path / "runs").exists()


# Killed, stopped, started again --------------------------------------------------------------------------------------


def test_stopped_by_a_signal_and_what_may_not_change(commands, tiny, tmp_path: Path) -> None:
    run, shard = tmp_path / "runs" / "a", tmp_path / "copy.tar"
    shutil.copy(SHARD, shard)
    keys = {"run.name": "a", "data.train": shard, "steps": 1000}
    running = commands.start(*tiny(keys))
    wait_for(lambda: logged(run, 3), "step 3")
    refused(commands.run(*tiny(keys)), 2, f"process {running.pid}", "run.name")
    os.kill(running.pid, signal.SIGTERM)
    stopped = running.wait()
    assert stopped.code == 75 and state(run)["status"] == "preempted", stopped.out
    done = state(run)["step"]
    assert (run / "checkpoints" / f"step_{done:08d}").is_dir() and len(losses(run)) == done
    changed = commands.run(*tiny({**keys, "optim.lr": 0.1}))
    refused(changed, 2, "optim.lr: 0.0005 there, 0.1 now", "resume=never")
    shutil.copy(VAL.with_name("noto-v1-trained.tar"), shard)
    refused(commands.run(*tiny(keys)), 2, "data.train", "copy.tar", "init_from")


def test_finished_again_anew_and_from_elsewhere(commands, tiny, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    assert commands.run(*tiny({"run.name": "a", "checkpoint.every": 3})).code == 0
    weights, metrics = last_weights(run), (run / "metrics.jsonl").read_bytes()
    names = {
        name.removeprefix("train/") for line in metrics.splitlines() for name in json.loads(line) if "train/" in name
    }
    page = (ROOT / "docs/reference/metrics.md").read_text()
    assert names and {name for name in names if f"`{name}`" not in page} == set()

    again = commands.run(*tiny({"run.name": "a"}))
    assert (again.code, again.out) == (0, f"already finished: {run}\n")
    # as if killed after the last step, before its page was made
    assert not (run / "report.html").exists()
    for status in ("running", "finished"):
        (run / "report.html").unlink(missing_ok=True)
        (run / "run_state.json").write_text(json.dumps({**state(run), "status": status}))
        late = commands.run(*tiny({"run.name": "a", "checkpoint.every": 3, "tracking.report": "true"}))
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


def test_init_from_takes_the_weights_and_their_temperature(commands, tiny, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run = tmp_path / "runs" / "a"
    assert commands.run(*tiny({"run.name": "a", "steps": 2, "debug": "overfit"})).code == 0
    begun = commands.run(*tiny({"run.name": "b", "init_from": run, "optim.lr": 1e-30, "optim.weight_decay": 0}))
    assert begun.code == 0 and "beginning with the weights of" in begun.out, begun.out
    newest = [max((r / "checkpoints").iterdir()) / "model.safetensors" for r in (run, run.parent / "b")]
    there, here = (load_file(path) for path in newest)
    assert there.keys() == here.keys()
    towers = [name for name in there if name.startswith("towers.") and "running" not in name and "num_b" not in name]
    assert towers and all(there[name].equal(here[name]) for name in towers)
    assert there["objective.logit_scale"].item() == pytest.approx(here["objective.logit_scale"].item(), rel=1e-6)
    assert len(losses(run.parent / "b")) == 6

    other = commands.run(*tiny({"run.name": "c", "init_from": run, "model.image.widths": [8, 8]}))
    refused(other, 2, f"init_from={run}")


# Data, evaluation, other ways to start -------------------------------------------------------------------------------


def test_damaged_data(commands, tiny, tmp_path: Path) -> None:
    shard = tmp_path / "copy.tar"
    shard.write_bytes(SHARD.read_bytes()[:100_000])
    code = tmp_path / "code"
    first, second = commands.world(2, *tiny({"data.train": shard}), DYAD_EXIT_CODE=str(code))
    refused(Ended(int(code.read_text()), first.out), 3, shard)
    assert second.out == ""


def test_data_damaged_behind_our_back_stops_all(commands, tiny, tmp_path: Path) -> None:
    shard = tmp_path / "copy.tar"
    shutil.copy(SHARD, shard)
    assert commands.run("data", "index", str(shard)).code == 0  # has an index now
    stamp = shard.stat().st_mtime_ns
    with shard.open("r+b") as file:
        for offset in range(1000, shard.stat().st_size, 4096):
            file.seek(offset)
            file.write(b"\xff")
    os.utime(shard, ns=(stamp, stamp))
    code = tmp_path / "code"
    keys = {"run.name": "b", "data.train": shard, "data.bad_samples": "stop"}
    ended = commands.world(2, *tiny(keys), DYAD_EXIT_CODE=str(code))
    assert code.read_text() == "3" and all(e.code in (3, 4) for e in ended)
    said = "".join(e.out for e in ended)
    assert f"{shard}: sample" in said and "offset" in said and "Traceback" not in said
    assert state(tmp_path / "runs" / "b")["status"] == "failed"


def results(folder: Path) -> dict[str, Any]:
    return {p.name: json.loads(p.read_text())["metrics"] for p in folder.glob("*.json")}


def test_eval_gives_the_numbers_of_the_last_evaluation(commands, tiny, tmp_path: Path) -> None:
    few = write_few_images(tmp_path / "few.tar")
    run = tmp_path / "runs" / "tiny"
    trained = commands.run(
        *tiny(
            {
                "run.name": "tiny",
                "steps": 4,
                "eval.every": 2,
                "data.val": few,
                "eval.suite": f"[retrieval:{write_few_images(tmp_path / 'others.tar')}]",
                "tracking.report": "true",
            }
        )
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
    refused(commands.run("eval", f"checkpoint={tmp_path / 'runs' / 'tinny'}"), 2, f"'{tmp_path}/runs/tiny'")
    refused(commands.run("eval", f"checkpont={run}"), 2, "'checkpoint'")
    (run / "eval").rename(tmp_path / "away")
    (run / "eval").write_text("")
    refused(commands.run("eval", f"checkpoint={run}", "examples=0"), 4, run / "eval")


@pytest.mark.parametrize("debug", ["smoke", pytest.param("overfit", marks=pytest.mark.soak)])
def test_debug_choices_with_the_emoji_recipe(commands, tmp_path: Path, debug: str) -> None:
    few = write_few_images(tmp_path / "few.tar")
    small = ["eval.suite=[]", f"data.val={few}", "global_batch_size=16", "tracking=local", f"data.train={SHARD}"]
    small += ["model.image.image_size=32", f"run.dir={tmp_path / 'runs'}"]
    ended = commands.run("train", "experiment=emoji", f"debug={debug}", "steps=2", *small)
    assert ended.code == 0, ended.out
    assert only_run(tmp_path / "runs").name.startswith("emoji-")
    assert not [line for line in ended.out.splitlines() if "oading weights" in line or "arning" in line]
