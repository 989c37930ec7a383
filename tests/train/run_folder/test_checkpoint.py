"""Checkpoints: bit-identical, checked before loading, whole or not there."""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import count, takewhile
from multiprocessing import get_context
from pathlib import Path
from shutil import copy, copytree, move, rmtree
from threading import Timer

import pytest
import torch
from helpers.messages import raises
from torch import Tensor, nn

from dyad.data.base.errors import ConfigError, DataError, HardwareError
from dyad.train.run_folder.checkpoint import FORMAT, OLDEST, Checkpoint, find_undamaged, tidy
from dyad.train.run_folder.checkpoint_state import CheckpointState, capture, restore
from dyad.train.run_folder.folder import steps
from dyad.train.run_folder.locate import locate
from dyad.train.run_folder.named_tensors import named_tensors, restore_weights
from dyad.train.run_folder.saving import write_checkpoint

FILES = ("model.safetensors", "optimizer.safetensors", "memory.safetensors", "state.json", "manifest.json")
MEMORY = {"log_u": torch.tensor([1e-42, -0.0, float("nan")]), "tau": torch.tensor([0.1, 0.2, 0.3])}


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.projection = nn.Linear(8, 4)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x_b6: Tensor) -> Tensor:
        return self.projection(self.trunk(x_b6))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))


class Run:
    """Two towers that share a projection, one frozen layer, a scalar parameter, AdamW."""

    def __init__(self, seed: int, fused: bool = False, backwards: bool = False) -> None:
        torch.manual_seed(seed)
        self.x, self.y, self.scale = Tower(), Tower(), Scale()
        self.y.projection = self.x.projection
        self.x.trunk[0].requires_grad_(False)
        towers = nn.ModuleDict({"x_tower": self.x, "y_tower": self.y})
        self.modules: dict[str, nn.Module] = {"towers": towers, "objective": self.scale}
        trained = [p for m in self.modules.values() for p in m.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained[::-1] if backwards else trained, lr=0.01, fused=fused)

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            noise = torch.Generator().manual_seed(step)
            x, y = torch.randn(2, 5, 6, generator=noise)
            loss = ((self.x(x) - self.y(y)) ** 2).mean() * self.scale.logit_scale.exp()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def state(self, step: int, **facts: object) -> CheckpointState:
        return capture(self.modules, self.optimizer, step, facts)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2, 4 and 6; state per sample too."""
    run = Run(0)
    for step in (2, 4, 6):
        run.train(step - 2, step)
        write_checkpoint(
            tmp_path, capture(run.modules, run.optimizer, step, {}, MEMORY | {"samples_seen": torch.tensor(step)}), 3
        )
    return tmp_path


def folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_resumed_run_equals_the_undisturbed_one_bit_for_bit(tmp_path: Path, fused: bool) -> None:
    undisturbed, stopped = Run(0, fused), Run(0, fused)
    losses = undisturbed.train(0, 8)
    assert stopped.train(0, 3) == losses[:3]
    path = write_checkpoint(tmp_path, stopped.state(3, samples_seen=15, data={"seed": 1}), keep=1)
    resumed = Run(1, fused, backwards=True)  # other initial weights, other order of parameters: names decide
    state = Checkpoint(path).read()
    assert (state.step, state.metadata) == (3, {"samples_seen": 15, "data": {"seed": 1}})
    restore(state, resumed.modules, resumed.optimizer)
    assert resumed.train(3, 8) == losses[3:]
    assert same(named_tensors(resumed.modules), named_tensors(undisturbed.modules))
    assert same(resumed.state(8).optimizer, undisturbed.state(8).optimizer)


def test_what_is_restored_does_not_depend_on_the_file(saved: Path) -> None:
    run = Run(1)
    restore(Checkpoint(folder(saved, 6)).read(), run.modules, run.optimizer)
    before = {k: v.clone() for k, v in run.state(6).optimizer.items()}
    for file in folder(saved, 6).iterdir():
        file.write_bytes(b"\0" * file.stat().st_size)
    assert same(run.state(6).optimizer, before)


def test_shared_and_temporary_tensors_are_saved_once_and_not_at_all(saved: Path) -> None:
    names = Checkpoint(folder(saved, 6)).weights().keys()
    assert "towers.x_tower.projection.weight" in names
    assert "towers.y_tower.projection.weight" not in names
    assert "towers.x_tower.trunk.1.running_mean" in names
    assert not any("scratch" in name for name in names)
    assert "objective.logit_scale" in names
    frozen = [n for n in Checkpoint(folder(saved, 6)).read().optimizer if "x_tower.trunk.0" in n]
    assert frozen == []


def test_the_own_keys_of_state_json_are_not_the_callers() -> None:
    run = Run(0)
    with raises(AssertionError, "state.json"):
        capture(run.modules, run.optimizer, 1, {"step": 2})


def test_state_per_sample_is_kept_to_the_bit_and_only_where_there_is_some(saved: Path, tmp_path: Path) -> None:
    state = Checkpoint(folder(saved, 6)).read()
    assert {name: t.numpy().tobytes() for name, t in state.sample_state.items()} == {
        **{name: t.numpy().tobytes() for name, t in MEMORY.items()},
        "samples_seen": torch.tensor(6).numpy().tobytes(),
    }
    plain = write_checkpoint(tmp_path / "plain", Run(0).state(1), keep=1)
    assert sorted(p.name for p in plain.iterdir()) == sorted(set(FILES) - {"memory.safetensors"})
    assert Checkpoint(plain).read().sample_state == {}
    copy(folder(saved, 6) / "memory.safetensors", plain)  # a damaged manifest may not list it
    with raises(DataError, "memory.safetensors"):
        Checkpoint(plain).read()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def forbid(path: Path) -> None:
    """Make every read of the file an OSError other than that it is missing, for root too: a link to itself."""
    path.unlink()
    path.symlink_to(path)


DAMAGE = {"flipped": flip, "truncated": truncate, "missing": Path.unlink, "unreadable": forbid}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_refused_and_passed_over(saved: Path, name: str, damage) -> None:
    damage(folder(saved, 6) / name)
    if name == "manifest.json" and damage is truncate:  # the last byte of JSON text is a newline: harmless
        truncate(folder(saved, 6) / name)
    named = "" if name == "manifest.json" and damage is flip else name.split(".")[0]  # it may hit the digest of another
    with raises(DataError, "step_00000006/", named):
        Checkpoint(folder(saved, 6)).read()
    notes: list[str] = []
    assert find_undamaged(saved, notes.append) == folder(saved, 4)
    assert len(notes) == 1
    assert "step_00000006" in notes[0]
    assert len(notes[0].splitlines()) == 1


def test_checkpoints_that_are_linked_are_verified_as_any(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    disk = tmp_path_factory.mktemp("disk") / "checkpoints"
    move(saved / "checkpoints", disk)
    (saved / "checkpoints").symlink_to(disk)
    assert find_undamaged(saved, pytest.fail) == folder(saved, 6) and Checkpoint(folder(saved, 6)).read().step == 6
    flip(disk / "step_00000006" / "model.safetensors")
    assert find_undamaged(saved, lambda line: None) == folder(saved, 4)


def test_when_no_checkpoint_is_whole_nothing_starts_again_by_itself(saved: Path, tmp_path: Path) -> None:
    for step in (2, 4, 6):
        flip(folder(saved, step) / "model.safetensors")
    with raises(DataError, "resume=never"):
        find_undamaged(saved, lambda line: None)
    assert find_undamaged(tmp_path / "other", lambda line: None) is None


@pytest.mark.parametrize(("age", "version"), [("newer", FORMAT + 1), ("older", OLDEST - 1)])
def test_another_format_is_refused_not_passed_over(saved: Path, age: str, version: int) -> None:
    manifest = folder(saved, 6) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": version}))
    with raises(ConfigError, age, f"format {version}"):
        find_undamaged(saved, lambda line: None)


def test_retention_keeps_the_newest(saved: Path) -> None:
    write_checkpoint(saved, Run(0).state(8), keep=2)
    assert [p.name for p in sorted((saved / "checkpoints").iterdir())] == ["step_00000006", "step_00000008"]
    write_checkpoint(saved, Run(0).state(10), keep=1)
    assert [p.name for p in (saved / "checkpoints").iterdir()] == ["step_00000010"]


def test_retention_keeps_every_so_many_steps(tmp_path: Path) -> None:
    for step in range(2, 16, 2):
        write_checkpoint(tmp_path, Run(0).state(step), keep=2, keep_every=6)
    assert steps(tmp_path) == [14, 12, 6]
    write_checkpoint(tmp_path, Run(0).state(16), keep=1)  # a later start may want no more of them
    assert steps(tmp_path) == [16]


@pytest.mark.parametrize("read", [Checkpoint.read, Checkpoint.weights])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_an_error_of_ours(
    read: Callable[[Checkpoint], object], saved: Path
) -> None:
    kept, newest = saved / "kept", folder(saved, 6)
    newest.rename(kept)
    for pause in range(0, 150, 5):
        copytree(kept, newest)
        removal = Timer(pause * 2e-5, rmtree, [newest])
        removal.start()
        with suppress(DataError):
            read(Checkpoint(newest))
        removal.join()


def test_retention_never_prefers_a_damaged_newer_one(saved: Path) -> None:
    flip(folder(saved, 6) / "model.safetensors")
    write_checkpoint(saved, Run(0).state(5), keep=1)  # the run fell back to 4 and went on
    assert find_undamaged(saved, lambda line: None) == folder(saved, 5)
    write_checkpoint(saved, Run(0).state(6), keep=1)  # and overtakes the damaged one
    notes: list[str] = []
    assert find_undamaged(saved, notes.append) == folder(saved, 6)
    assert notes == []


def test_what_a_killed_save_leaves_is_cleared_up(saved: Path) -> None:
    checkpoints = saved / "checkpoints"
    half = checkpoints / ".step_00000008.partial"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    folder(saved, 6).rename(checkpoints / ".step_00000006.old")  # killed between the two renames of a second save
    (checkpoints / ".step_00000004.old").mkdir()  # killed just after them
    assert find_undamaged(saved, lambda line: None) == folder(saved, 4)
    tidy(saved)
    assert find_undamaged(saved, lambda line: None) == folder(saved, 6)
    assert not list(checkpoints.glob(".*"))
    tidy(saved / "nowhere")


def killed_in(work: Callable[[], object], folder: Path, moment: int, most: int) -> bool:
    """Do it in a process that is killed -9 as it touches the `moment`th path in the folder, or the kernel kills as it
    writes a file beyond `most` bytes. False: it got to its end."""
    child = os.fork()
    if child == 0:
        touched = 0

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal touched
            if event.startswith(("open", "os.", "shutil.")) and arguments and str(folder) in str(arguments[0]):
                touched += 1
                if touched > moment:
                    signal.raise_signal(signal.SIGKILL)

        sys.addaudithook(watch)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


@pytest.mark.parametrize("step", [6, 8], ids=["again", "next"])
def test_killed_anywhere_in_a_save_one_whole_checkpoint_is_the_newest(saved: Path, step: int) -> None:
    new, old, run = Run(1).state(step), Checkpoint(folder(saved, 6)).read(), saved / "run"

    def outcome(moment: int, most: int) -> tuple[bool, bool]:
        """Whether the save was killed, and whether its checkpoint is the one that is found."""
        copytree(saved / "checkpoints", run / "checkpoints")
        killed = killed_in(lambda: write_checkpoint(run, new, keep=1), run, moment, most)
        tidy(run)
        found = find_undamaged(run, pytest.fail)
        assert found is not None and not list((run / "checkpoints").glob(".*"))
        state = Checkpoint(found).read()
        is_new = same(state.model, new.model)
        assert is_new or (same(state.model, old.model) and same(state.optimizer, old.optimizer))
        rmtree(run)
        return killed, is_new

    endless = 1 << 30
    touched = list(takewhile(lambda fate: fate[0], (outcome(moment, endless) for moment in count())))
    written = list(takewhile(lambda fate: fate[0], (outcome(endless, 400 * n) for n in count())))
    assert len(touched) > 10 and {is_new for _, is_new in touched} == {False, True}
    assert len(written) > 3 and not any(is_new for _, is_new in written)
    assert outcome(endless, endless) == (False, True)


def test_a_save_that_fails_leaves_the_older_checkpoints(saved: Path) -> None:
    state = Checkpoint(folder(saved, 6)).read()
    state.step, state.model = 8, {**state.model, "big": torch.zeros(100_000)}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with raises(HardwareError, "step_00000008"):
            write_checkpoint(saved, state, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(p.name for p in (saved / "checkpoints").iterdir()) == [f"step_0000000{n}" for n in (2, 4, 6)]
    assert find_undamaged(saved, lambda line: None) == folder(saved, 6)


def part_of_two(run_dir: Path, rank: int, full: bool) -> str:
    """Save a part in a process of its own, which may not write a large file if `full`; return its error."""
    rows = {"x": slice(100_000 * rank, 100_000 * (rank + 1))}
    state = CheckpointState(8, {"x": torch.zeros(100_000)}, {}, {}, {}, part=(rank, 2, "a"), rows=rows)
    if full:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        write_checkpoint(run_dir, state, keep=1)
    except HardwareError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("full", [0, 1])
def test_a_part_without_room_ends_the_save_at_once(saved: Path, full: int) -> None:
    """Else rank 0 would wait ten minutes for the part of rank 1."""
    begun = time.monotonic()
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        errors = list(pool.map(part_of_two, [saved, saved], [0, 1], [full == 0, full == 1]))
    assert time.monotonic() - begun < 60 and "File too large" in errors[0]
    assert ("rank 1 cannot write its part" in errors[0]) == bool(full)
    assert find_undamaged(saved, pytest.fail) == folder(saved, 6)
    if full:  # else rank 1 may begin its part when rank 0 has given up
        assert not list((saved / "checkpoints").glob(".*"))


def test_weights_of_another_model_are_refused_by_name(saved: Path) -> None:
    run = Run(1)
    run.x.trunk[0] = nn.Linear(6, 8, bias=False)
    run.y.trunk[0] = nn.Linear(6, 7)
    run.x.add_module("extra", nn.Linear(1, 1))
    before = {k: v.clone() for k, v in named_tensors(run.modules).items()}
    state = Checkpoint(folder(saved, 6)).read()
    named = (
        "towers.x_tower.extra.weight, towers.x_tower.extra.bias",
        "towers.x_tower.trunk.0.bias",
        "towers.y_tower.trunk.0.weight (8, 6) there, (7, 6) here",
    )
    with raises(ConfigError, *named):
        restore(state, run.modules, run.optimizer)
    assert same(before, named_tensors(run.modules))
    with raises(ConfigError, "n.0.weight", "n.0.bias", "n.1.weight", "n.1.bias"):
        restore_weights(state.model, {"n": nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))})


def test_optimiser_state_of_a_parameter_that_is_not_trained_is_refused(saved: Path) -> None:
    run = Run(1)
    fewer = torch.optim.AdamW(run.y.parameters())
    with raises(ConfigError):
        restore(Checkpoint(folder(saved, 6)).read(), run.modules, fewer)


def test_weights_alone_of_some_parts(saved: Path) -> None:
    run = Run(1)
    optimizer = dict(run.optimizer.state)
    notes: list[str] = []
    path = locate(saved, notes.append)
    assert path == folder(saved, 6) == locate(path, notes.append)
    restore_weights(Checkpoint(path).weights(), {"towers": run.modules["towers"]})
    assert torch.equal(run.x.projection.weight, Checkpoint(path).read().model["towers.x_tower.projection.weight"])
    assert run.scale.logit_scale.item() == 1.5
    assert run.optimizer.state == optimizer
    with raises(ConfigError, "nowhere"):
        locate(saved / "nowhere", notes.append)
