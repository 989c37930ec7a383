"""What the machine offers: versions, devices, cores, faiss, shared memory, open files, clock, disk."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from data.errors import ExitCode
from data.index import available_cores
from train.findings import Finding, fail, ok, warn

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("torch", "transformers", "open-clip-torch", "timm", "accelerate", "hydra-core", "wandb")
FAISS = {"cpu": "faiss-cpu", "gpu": "faiss-gpu-cuvs"}
INSTALL = "pip install -e '.[cpu]' -c requirements.lock   ([gpu] with a GPU), or: source launch/setup.sh demo"
BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 and Arm names of a CPU that computes in bfloat16
LOADERS_SHARE = 1 << 30  # bytes of shared memory that batches of usual pictures want
LEAST_DISK, GOOD_DISK = 100 << 20, 5 << 30
LEAST_FILES, GOOD_FILES = 256, 1024


def versions() -> Iterator[Finding]:
    """Python and the packages against pyproject.toml (what can work) and requirements.lock (what was tested)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = platform.python_version()
    if python in SpecifierSet(project["requires-python"]):
        yield ok("python", f"{python} on {platform.system()} {platform.machine()}")
    else:
        yield fail("python", f"{python}: needs {project['requires-python']}", INSTALL, ExitCode.CONFIG)
    here, wrong = installed(), []
    for needed in map(Requirement, project["dependencies"]):
        version = here.get(canonicalize_name(needed.name))
        if version is None:
            wrong.append(f"{needed.name} is not installed")
        elif version not in needed.specifier:
            wrong.append(f"{needed.name} {version} is not {needed.specifier}")
    for problem in wrong:
        yield fail("packages", problem, INSTALL, ExitCode.CONFIG)
    other = [f"{name} {here[name]} ({locked} there)" for name, locked in _locked().items() if _differs(name, locked)]
    if other:
        more = f" and {len(other) - 5} more" if len(other) > 5 else ""
        yield warn("packages", f"not as in requirements.lock: {', '.join(other[:5])}{more}", INSTALL)
    elif not wrong:
        shown = ", ".join(f"{name} {here[name]}" for name in SHOWN)
        yield ok("packages", f"as in requirements.lock: {shown}")


@cache
def installed() -> Mapping[str, str]:
    """Versions by canonical name, each as the import system would find it: the first of the path."""
    here: dict[str, str] = {}
    for distribution in distributions():
        if distribution.metadata["Name"]:
            here.setdefault(canonicalize_name(distribution.metadata["Name"]), distribution.version)
    return here


def _locked() -> Mapping[str, str]:
    """Versions that requirements.lock has for this machine."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    entries = [Requirement(line) for line in lines if line and line[0] not in "#- "]
    wanted = [entry for entry in entries if entry.marker is None or entry.marker.evaluate()]
    return {canonicalize_name(entry.name): next(iter(entry.specifier)).version for entry in wanted if entry.specifier}


def _differs(name: str, locked: str) -> bool:
    """Builds of one version (2.15.0+cpu, 2.15.0+cu132) are alike."""
    version = installed().get(name)
    return version is not None and Version(version).public != Version(locked).public


def devices(precision: str) -> Iterator[Finding]:
    """GPUs that torch can use, or why it cannot; what the CPU does with `precision`."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        yield from _gpus(precision)
        return
    driver = _driver()
    if driver and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        yield ok("devices", "CUDA_VISIBLE_DEVICES is empty: the GPU is hidden, the CPU trains")
    elif driver and torch.version.cuda is None:
        yield fail("devices", f"{driver}, but torch {torch.__version__} is built for the CPU", INSTALL)
    elif driver:
        why = str(said[0].message).splitlines()[0] if said else "torch finds no device"
        fix = f"update the driver to one of CUDA {torch.version.cuda}, or take a torch that is built for yours"
        yield fail("devices", f"{driver}, but not for torch {torch.__version__}: {why}", fix)
    else:
        yield ok("devices", f"no GPU: torch {torch.__version__} on {available_cores()} cores")
    flags = _cpu_flags()
    if precision == "bf16" and flags and not flags & BF16:
        yield warn("precision", "bf16, but this CPU has no instructions for it: slower than fp32", "precision=fp32")
    if precision == "fp16":
        yield warn("precision", "fp16 is for GPUs", "precision=bf16 or fp32 on a CPU")


def _gpus(precision: str) -> Iterator[Finding]:
    import torch

    built = torch.cuda.get_arch_list()
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        name = f"cuda:{number} {found.name}, {size(found.total_memory)}, sm_{found.major}{found.minor}"
        if built and not any(arch.removeprefix("sm_").startswith(str(found.major)) for arch in built):
            yield fail("devices", f"{name}: torch {torch.__version__} is built for {', '.join(built)}", INSTALL)
        elif precision == "bf16" and found.major < 8:
            yield warn("devices", f"{name}: computes bf16 in software", "precision=fp16")
        else:
            yield ok("devices", f"{name}, CUDA {torch.version.cuda}")


def gpu_count() -> int:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # devices() tells why there is none
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _driver() -> str:
    """The first GPU and its driver as nvidia-smi tells them; '' without."""
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    return f"{done.stdout.splitlines()[0]} (driver)" if done.returncode == 0 and done.stdout.strip() else ""


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}


def threads() -> Iterator[Finding]:
    """Threads of this process against the cores it may use."""
    import torch

    cores, quota = available_cores(), _quota()
    usable = min(cores, quota or cores)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    wanted = torch.get_num_threads() * processes
    name = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}" if "OMP_NUM_THREADS" in os.environ else "torch"
    shown = f"{wanted} threads ({name}, {processes} process{'es' * (processes > 1)}) on {usable:g} cores"
    if wanted > max(usable, 1):
        fix = f"export OMP_NUM_THREADS={max(int(usable) // processes, 1)}"
        yield warn("threads", f"{shown}: they wait for each other", fix)
    else:
        yield ok("threads", shown)


def load(average: float) -> Iterator[Finding]:
    """Processes that compute, the mean of the last minute, against the cores."""
    shown = f"{average:.1f} processes compute, on {os.cpu_count()} cores"
    if average > (os.cpu_count() or 1):
        yield warn("load", f"{shown}: a step takes several times as long", "wait for them, or stop them")
    else:
        yield ok("load", shown)


def _quota() -> float | None:
    """Cores that the container may use, where it is limited."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def faiss_kind() -> Iterator[Finding]:
    """One faiss, of the kind that fits the machine."""
    import torch

    named = sorted(name for name in installed() if name.startswith("faiss"))
    kind = "gpu" if torch.cuda.is_available() else "cpu"
    if len(named) > 1:
        fix = f"pip uninstall -y {' '.join(named)}; pip install -e '.[{kind}]' -c requirements.lock"
        yield fail("faiss", f"{' and '.join(named)} install the same module over each other", fix, ExitCode.CONFIG)
        return
    if not named:
        fix = f"pip install -e '.[{kind}]' -c requirements.lock"
        yield fail("faiss", "is not installed: evaluation and mining search with it", fix, ExitCode.CONFIG)
        return
    import faiss

    on_gpu = hasattr(faiss, "StandardGpuResources")
    shown = f"{named[0]} {faiss.__version__}, {'GPU and CPU' if on_gpu else 'CPU'}"
    if kind == "gpu" and not on_gpu:
        fix = f"pip uninstall -y {named[0]}; pip install -e '.[gpu]' -c requirements.lock"
        yield warn("faiss", f"{shown}: searches leave the GPU idle", fix)
    else:
        yield ok("faiss", shown)


def shared_memory(workers: int, batch_bytes: int, folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Room for the batches that loader processes hand over. batch_bytes: one, of one process; 0: unknown."""
    if not folder.is_dir():
        return
    _, _, free = shutil.disk_usage(folder)
    needed = (2 * workers + 1) * batch_bytes
    shown = f"{size(free)} free"
    fix = "docker run --shm-size=8g (or --ipc=host), mount -o remount,size=8g /dev/shm, or data.workers=0"
    if free < needed or free < 32 << 20:
        wants = f"; {workers} workers want up to {size(needed)}" if needed else ""
        yield fail(str(folder), f"{shown}{wants}: loader processes die with a bus error", fix)
    elif not needed and free < LOADERS_SHARE:
        yield warn(str(folder), f"{shown}: too little for loaders of large batches", fix)
    else:
        yield ok(str(folder), shown)


def open_files() -> Iterator[Finding]:
    """Each loader process keeps up to 256 shards open."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    fix = f"ulimit -n {hard if 0 < hard < 65536 else 65536}"
    if limit < LEAST_FILES:
        yield fail("open files", f"at most {limit}: shards and sockets need {LEAST_FILES} and more", fix)
    elif limit < GOOD_FILES:
        yield warn("open files", f"at most {limit}: too few for many shards", fix)
    else:
        yield ok("open files", f"at most {limit}")


def clock(now: float) -> Iterator[Finding]:
    """A clock behind our own files: certificates fail, time stamps of indexes and checkpoints mislead."""
    newest = max(path.stat().st_mtime for path in Path(__file__).parent.glob("*.py"))
    if now < newest - 86_400:
        yield warn("clock", "is days behind this checkout's own files", "set it: timedatectl set-ntp true")
    else:
        yield ok("clock", "is not behind this checkout's files")


def disk(topic: str, folder: Path) -> Iterator[Finding]:
    """Room and permission where `folder` is or will be."""
    place = folder.expanduser().absolute()
    place = next(parent for parent in (place, *place.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    shown = f"{folder}: {size(free)} free"
    if not os.access(place, os.W_OK):
        yield fail(topic, f"{folder}: {place} cannot be written", _elsewhere(topic), ExitCode.CONFIG)
    elif free < LEAST_DISK:
        yield fail(topic, f"{shown}: the first checkpoint would not fit", _elsewhere(topic))
    elif free < GOOD_DISK:
        full = f"{shown}: a few checkpoints of a large model fill it"
        yield warn(topic, full, f"{_elsewhere(topic)}, checkpoint.keep=1")
    else:
        yield ok(topic, shown)


def size(count: float) -> str:
    """Bytes as people read them: 512 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _elsewhere(topic: str) -> str:
    return "run.dir=FOLDER elsewhere" if topic == "run.dir" else "set HF_HOME or XDG_CACHE_HOME to a folder elsewhere"
