"""What python -m train.doctor finds, each finding provoked for real: folders, indexes, mounts, limits, packages."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.cli import ROOT, Commands
from helpers.rows import dpr_row, write_lines
from helpers.shards import image, index_shard, pairs, write_tar

from dyad.data.base.errors import ExitCode
from dyad.data.base.findings import Finding, Level, fail, ok, warn
from dyad.data.shards.rows import open_rows
from dyad.doctor import configuration, group, machine, main as doctor
from dyad.doctor.main import _loaders, findings_of
from dyad.train.cli.compose import compose_config
from dyad.train.config import TrainConfig

EMOJI = ROOT / "data/samples/emoji/fxemoji-trained.tar"
UNSHARE = ["unshare", "--mount", "--map-root-user"]


def worst(findings: Iterable[Finding]) -> Finding:
    return max(findings, key=lambda finding: list(Level).index(finding.level))


@cache
def composed(*words: str) -> TrainConfig:
    return compose_config(["tracking.wandb=disabled", *words])


def of(words: Sequence[str]) -> TrainConfig:
    return deepcopy(composed(*words))


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A copy of a small shard, indexed."""
    copy = Path(shutil.copy(EMOJI, tmp_path / "a.tar"))
    index_shard(str(copy))
    return copy


def data(shard: Path, *words: str) -> list[Finding]:
    config = of(["experiment=emoji", *words])
    config.data.train = str(shard)
    return list(findings_of("data", lambda: configuration.data(config)))


def is_told(finding: Finding, level: Level, *parts: str) -> bool:
    """The level, and what the line and its fix must name."""
    return finding.level is level and not [part for part in parts if part not in str(finding)]


# Data -----------------------------------------------------------------------------------------------------------------


def test_good_data_are_read_and_nothing_is_written(shard: Path) -> None:
    before = sorted(shard.parent.rglob("*"))
    assert is_told(worst(data(shard)), Level.ok, "samples, indexed, first and last read")
    shutil.rmtree(shard.parent / ".index")
    assert is_told(worst(data(shard)), Level.ok, "read whole, indexed at the start")
    assert sorted(shard.parent.rglob("*")) == [path for path in before if ".index" not in str(path)]


@pytest.mark.parametrize(("bad", "mode"), [(0, "indexed"), (2, "indexed"), (0, "stream")])
def test_both_ends_of_a_shard_without_an_index_are_read(bad: int, mode: str, tmp_path: Path) -> None:
    members = pairs(3)
    members[2 * bad] = (members[2 * bad][0], image()[:40])
    words = f"data.mode={mode} data.captions=[txt] data.caption_weights=null"
    finding = worst(data(write_tar(tmp_path / "a.tar", members), *words.split()))
    assert is_told(finding, Level.fail, f"sample '{bad:06d}'") and finding.code is ExitCode.DATA


def test_a_missing_shard(tmp_path: Path) -> None:
    finding = worst(data(tmp_path / "b.tar"))
    assert is_told(finding, Level.fail, "no 'b.tar'") and finding.code is ExitCode.CONFIG


def test_a_shard_whose_bytes_changed_under_its_index(shard: Path) -> None:
    stamp = shard.stat()
    content = bytearray(shard.read_bytes())
    content[600:700] = bytes(100)
    shard.write_bytes(content)
    os.utime(shard, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    finding = worst(data(shard))
    assert is_told(finding, Level.fail, "CRC32", str(shard)) and finding.code is ExitCode.DATA


def test_a_shard_that_was_cut(shard: Path) -> None:
    shutil.rmtree(shard.parent / ".index")
    os.truncate(shard, 10_000)
    finding = worst(data(shard))
    assert is_told(finding, Level.fail, "offset", "python -m data check") and finding.code is ExitCode.DATA


def test_an_index_of_an_earlier_state(shard: Path) -> None:
    os.utime(shard)
    assert is_told(worst(data(shard)), Level.warn, "changed since it was indexed", "python -m data index")


def test_captions_that_are_not_there(shard: Path) -> None:
    assert is_told(
        worst(data(shard, "data.captions=[captain]", "data.caption_weights=null")), Level.fail, "'captain'", "'caption'"
    )


def test_questions_of_a_folder_and_of_a_file(tmp_path: Path) -> None:
    other = of(["experiment=topics"])
    assert is_told(worst(configuration.data(other)), Level.ok, "queries.jsonl")
    rows = tmp_path / "train.jsonl"
    rows.write_text('{"question": "a", "positive_ctxs": []}\n')
    other.data.train = str(rows)
    finding = worst(findings_of("data", lambda: configuration.data(other)))
    assert is_told(finding, Level.fail, "positive_ctxs is empty") and finding.code is ExitCode.DATA


def test_rows_without_the_hard_negatives_wanted(tmp_path: Path) -> None:
    none, some = (write_lines(tmp_path / f"{n}.jsonl", [dpr_row(i, hard=n) for i in range(5)]) for n in (0, 1))
    config = of(["experiment=mnrl", "model.text.name=x", f"data.train={none}"])
    for _ in range(2):  # the second time with an index
        finding = worst(configuration.data(config))
        assert is_told(finding, Level.warn, "data.negatives.per_row=1", "5 rows", "eval.mine", "per_row=0")
        open_rows([str(none)])
    config.data.train = str(some)
    assert worst(configuration.data(config)).level is Level.ok


def test_rows_with_negatives_of_an_objective_of_pairs(tmp_path: Path) -> None:
    """As in training, in a table too; whoever learns lists of scores takes the rows."""
    row = {"query": "a", "pos": ["b"], "neg": ["c"], "pos_s": [1], "neg_s": [0]}
    lines, table = write_lines(tmp_path / "train.jsonl", [row]), tmp_path / "train.csv"
    table.write_text('anchor,positive,negative,s\na,b,c,"[1,0]"\n')
    for rows in (lines, table):
        config = of(["experiment=sts", "model.text.name=x", f"data.train={rows}", "data.teacher=s"])
        assert is_told(worst(findings_of("data", configuration.data, config)), Level.fail, "no pair", "margin_mse")
    lists = ["objective=margin_mse", "data.negatives.per_row=1"]
    config = of(["experiment=mnrl", "model.text.name=x", f"data.train={lines}", "data.teacher=s", *lists])
    assert worst(configuration.data(config)).level is Level.ok


# Trackers and the run -------------------------------------------------------------------------------------------------


def test_online_without_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://localhost:1")
    config = compose_config(["experiment=emoji", "tracking.wandb=online"])
    assert is_told(
        worst(findings_of("wandb", lambda: configuration.tracking(config))), Level.fail, "wandb login", "offline"
    )


def test_where_a_run_stands(tmp_path: Path) -> None:
    words = ["experiment=emoji", f"run.dir={tmp_path}", "run.name=a"]
    config = of(words)
    assert is_told(worst(configuration.run(words, config)), Level.ok, "is new; 1200 steps")
    (tmp_path / "a" / "checkpoints" / "step_00000400").mkdir(parents=True)
    assert is_told(worst(configuration.run(words, config)), Level.ok, "goes on from step_00000400")
    anew = [*words, "resume=never"]
    assert is_told(worst(configuration.run(anew, of(anew))), Level.ok, "begins again", "put aside")
    other = [*words[:-1], "run.name=b", f"resume={tmp_path}/a"]
    assert is_told(worst(configuration.run(other, of(other))), Level.ok, f"b goes on from {tmp_path}/a")
    unread = [*words, "eval.depth=200"]
    refused = worst(findings_of("run", lambda: configuration.run(unread, of(unread))))
    assert is_told(refused, Level.fail, "eval.depth=200", "Leave it out")
    plan = ["plan.gpus=8", "model.name=ViT-B-32"]
    assert is_told(worst(configuration.run(plan, of(plan))), Level.ok, "plan")


# The machine ----------------------------------------------------------------------------------------------------------


def test_two_faiss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path, "faiss_gpu", "1.7.2")
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = worst(machine.faiss_kind())
    assert is_told(finding, Level.fail, "faiss-gpu", "pip uninstall -y faiss-", "requirements.lock")


def test_a_package_that_is_not_the_tested_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path, "accelerate", "1.11.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = worst(machine.versions())
    assert is_told(finding, Level.warn, "accelerate 1.11.0", "-c requirements.lock")


def test_a_package_that_cannot_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path, "transformers", "4.0.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = worst(machine.versions())
    assert is_told(finding, Level.fail, "transformers 4.0.0 is not", ">=5") and finding.code is ExitCode.CONFIG


@pytest.mark.parametrize("version", ["2.8.0a0+34c6371d24.nv25.08", "2.11.0+cu130"])
def test_any_torch_that_is_new_enough(version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also a container's, which is built before its release, and is not the one of requirements.lock."""
    install(tmp_path, "torch", version)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not [each for each in machine.versions() if each.level is not Level.ok and f"torch {version}" in each.text]


def test_which_torch_runs_and_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = machine.torch_found()
    assert is_told(finding, Level.ok, torch.__version__, str(Path(torch.__file__).parent))
    monkeypatch.setattr("dyad.train.distributed.sharding.FINALIZED", False)
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    (finding,) = machine.torch_found()
    assert is_told(finding, Level.ok, "2.8.0, ", "; lacks the kernels of the loss (torch 2.11), one averaging of ")


def test_the_metadata_of_a_wheel_serve_where_there_is_no_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Requirements of extras and of other systems do not count, and there is no lock file to compare with."""
    monkeypatch.setattr(machine, "PROJECT", tmp_path / "none")
    monkeypatch.setattr(machine, "LOCK", tmp_path / "none")
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "accelerate", "1.11.0")
    optional = ["nowhere; extra == 'cpu'", "nowhere; sys_platform == 'plan9'"]
    info = install(tmp_path, "dyad", "0.1.0", "Requires-Python: >=3.11", *[f"Requires-Dist: {o}" for o in optional])
    python, packages = machine.versions()
    assert python.level is Level.ok and is_told(packages, Level.ok, "as required: transformers", "accelerate 1.11.0")
    with (info / "METADATA").open("a") as file:
        file.write("Requires-Dist: nowhere>=1\nRequires-Dist: accelerate>=2\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # drops what was cached of the folder
    problems = [finding.text for finding in machine.versions()][1:]
    assert problems == ["nowhere is not installed", "accelerate 1.11.0 is not >=2"]


def install(folder: Path, name: str, version: str, *fields: str) -> Path:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name.replace('_', '-')}", f"Version: {version}", *fields]
    (info / "METADATA").write_text("\n".join([*lines, ""]))
    return info


def test_few_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for limit, level in ((200, Level.fail), (512, Level.warn), (min(2048, hard), Level.ok)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            assert is_told(worst(machine.open_files()), level, str(limit), *["ulimit -n"] * (level is not Level.ok))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "999")
    assert is_told(worst(machine.threads()), Level.warn, "999 processes", "export OMP_NUM_THREADS=1")


def test_a_place_for_runs_that_cannot_be_written() -> None:
    finding = worst(machine.disk("run.dir", Path("/proc/self/runs"), "run.dir=FOLDER"))
    assert is_told(finding, Level.fail, "/proc/self", "run.dir=FOLDER")


def test_shared_memory_that_is_too_little_for_the_loaders() -> None:
    assert is_told(worst(machine.shared_memory(4, 1 << 50)), Level.fail, "4 workers", "--shm-size=8g")


@pytest.mark.parametrize(("experiment", "images"), [("emoji", 1), ("simclr_emoji", 2)])
def test_the_images_of_a_batch_take_shared_memory(experiment: str, images: int) -> None:
    config = compose_config([f"experiment={experiment}", "data.workers=2"])
    side = config.model.image.image_size or 224
    assert _loaders(config) == (2, config.global_batch_size * images * 3 * side * side)


@pytest.mark.mounts
def test_a_small_mount(tmp_path: Path) -> None:
    code = f"""from pathlib import Path
from dyad.doctor.machine import *
print(*shared_memory(2, 0, Path("{tmp_path}")), *disk("run.dir", Path("{tmp_path}/runs"), "elsewhere"), sep="\\n")
print(*shared_memory(None, 0, Path("{tmp_path}")), *shared_memory(0, 1 << 50, Path("{tmp_path}")), sep="\\n")"""
    script = f'mount -t tmpfs -o size=1m none "{tmp_path}" && exec "$0" -c "$1"'
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", script, sys.executable, code], capture_output=True, text=True, cwd=ROOT
    )
    both = done.stdout.split("fail")
    assert not both[0] and len(both) == 4 and all("1 MiB free" in one and "→" in one for one in both[1:]), done
    assert done.stdout.splitlines()[-1].startswith("ok") and "data.workers=0" not in done.stdout.splitlines()[-1]


# The command ----------------------------------------------------------------------------------------------------------


def test_words_that_are_no_keys_are_the_first_finding() -> None:
    finding = next(doctor.run_checks(["stepz=3"]))
    assert is_told(finding, Level.fail, "stepz", "'steps'") and finding.code is ExitCode.CONFIG


def test_the_exit_code_is_that_of_the_least_failure(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [ok("a", "good"), fail("b", "bad", code=ExitCode.HARDWARE), warn("c", "well", "do"), fail("b", "bad")]
    assert doctor.report(findings, as_json=False) == 4
    assert doctor.report([*findings, fail("d", "worse", code=ExitCode.CONFIG)], as_json=False) == 2
    assert doctor.report(findings[:1], as_json=False) == 0
    shown = capsys.readouterr().out
    assert shown.count("bad") == 2 and "ready" in shown and "1 to mend, 1 to know of" in shown
    doctor.report(findings, as_json=True)
    assert [f["level"] for f in json.loads(capsys.readouterr().out)] == ["ok", "fail", "warn"]


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """A folder with the samples, and a stranger's package."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").write_text("raise ImportError")
    (tmp_path / "data" / "samples").symlink_to(ROOT / "data/samples")
    return tmp_path


def test_the_command_from_a_strange_folder_and_an_interface_that_is_not_there(strange: Path) -> None:
    command = [sys.executable, "-m", "train.doctor", "stepz=3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "nowhere0"}
    done = subprocess.run(command, cwd=strange, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "unknown key 'stepz'" in done.stdout and "ImportError" not in done.stdout
    (told,) = re.findall(r"^fail +gloo .*\n.*", done.stdout, re.MULTILINE)
    assert "GLOO_SOCKET_IFNAME=nowhere0" in told and "one of lo" in told


def test_the_command_examines_this_machine_and_one_line_speaks_for_all_ranks(commands: Commands, strange: Path) -> None:
    """Two processes meet that rank 0 starts, and the two ranks."""
    ranks = commands.world(2, "train.doctor", "experiment=emoji", "tracking.wandb=disabled", cwd=str(strange))
    said = "".join(rank.out for rank in ranks)
    assert not any(rank.code for rank in ranks), said
    assert {"gloo", "faiss", "data", "model", "run"} <= {*said.split()}
    assert re.search(r"two processes met and agreed; 16 MiB summed at [\d.]+ GB/s \(usual: about 1 GB/s\)", said)
    assert said.count("2 agreed; 16 MiB summed at ") == 1 and said.count("ready") == 1


@pytest.mark.parametrize("as_json", [True, False])
def test_credentials_stay_out_of_findings(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    doctor.report([fail("data", "'https://me:canary@host/a.tar?sig=canary' is away")], as_json)
    out = capsys.readouterr().out
    assert "https://[redacted]@host/a.tar?[redacted]" in out and "canary" not in out


LINES_OF_A_GROUP = """import io, os, socket, sys
from dyad.doctor import group
here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
own, out = os.getpid(), os.dup(1)
os.dup2(there.fileno(), 1)
sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)  # that of PYTHONUNBUFFERED=1
group.main("gloo", 2)
here.settimeout(1)
while os.getpid() == own:
    try:
        os.write(out, f"{here.recv(100)!r}\\n".encode())
    except TimeoutError:
        break
"""


def test_each_process_of_a_group_writes_its_line_at_once(commands: Commands, tmp_path: Path) -> None:
    """They share a pipe: two writes per line mix the lines. A datagram socket keeps the writes apart."""
    (tmp_path / "lines_of_a_group.py").write_text(LINES_OF_A_GROUP)
    done = commands.run("helpers.elsewhere", "lines_of_a_group", cwd=str(tmp_path))
    lines = [each for each in done.out.splitlines() if "agree" in each]  # gloo of torch 2.8 writes, too
    assert done.code == 0 and len(lines) == 2, done
    assert all(re.fullmatch(r"b'all agree at [\d.e+-]+\\n'", line) for line in lines), lines


def test_bandwidth_is_judged() -> None:
    assert is_told(group._judged("", 1.5), Level.warn, "256 MiB summed at 1.5 GB/s", "NET/IB")
    assert is_told(group._judged("", 180), Level.ok, "180 GB/s", "NVLink")
    assert is_told(group._judged("", 0), Level.ok, "one process")
    assert is_told(group._judged("unhandled system error", 0), Level.fail, "unhandled system error", "NCCL_DEBUG=WARN")


def test_kernels_that_cannot_be_compiled_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    for error, fix in (
        (RuntimeError("Failed to find C compiler. Please specify via CC\nmore"), "install gcc"),
        (PermissionError(13, "Permission denied", "triton/cache"), "set TRITON_CACHE_DIR"),
    ):

        def ones(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr("dyad.train.losses.sums.triton_setup.torch.ones", ones)
        (finding,) = machine.kernels()
        assert is_told(finding, Level.warn, str(error).splitlines()[0], fix) and "more" not in str(finding)


def test_without_a_gpu_no_kernels_are_looked_at() -> None:
    assert list(machine.kernels()) == []
