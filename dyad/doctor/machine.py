"""Check the machine: versions, devices, threads, faiss, shared memory, open files, disk.

Each check yields findings: lines marked ok, warn or fail, with a fix.
"""

import os
import platform
import re
import resource
import shutil
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dyad.data.base.errors import ExitCode
from dyad.data.base.findings import Finding, fail, ok, warn
from dyad.data.base.parallel import available_cores, core_quota

ROOT = Path(__file__).resolve().parents[2]  # the checkout, or the installed package
PROJECT, LOCK = ROOT / "pyproject.toml", ROOT / "requirements.lock"  # a wheel has neither
SHOWN = ("transformers", "open-clip-torch", "timm", "accelerate", "hydra-core", "wandb")
INSTALL_EXTRA = "pip install -e '.[{}]' -c requirements.lock" if LOCK.exists() else "pip install 'dyad.whl[{}]'"
INSTALL = f"{INSTALL_EXTRA.format('cpu')}   ([gpu] with a GPU), or in a checkout: source launch/setup.sh demo"
FROM_TORCH = re.compile("torch$|torchvision$|triton$|nvidia-|cuda-")  # packages that are installed with torch
LEAST_SHARED, GOOD_SHARED = 32 << 20, 1 << 30  # bytes
LEAST_DISK, GOOD_DISK = 100 << 20, 5 << 30
LEAST_FILES, GOOD_FILES = 256, 1024


def versions() -> Iterator[Finding]:
    """Check the versions of Python and packages: fail if Dyad needs others, warn if requirements.lock has others.

    Packages that come with torch, and packages that are not installed, are not compared with requirements.lock: see
    `torch_found`. Without that file, as in a wheel, only what Dyad needs is compared.
    """
    if PROJECT.exists():
        project = tomllib.loads(PROJECT.read_text())["project"]
        required_python, required = project["requires-python"], project["dependencies"]
    else:
        required_python, required = metadata.metadata("dyad")["Requires-Python"], metadata.requires("dyad") or []
    python = platform.python_version()
    if python in SpecifierSet(required_python):
        yield ok("python", f"{python} on {platform.system()} {platform.machine()}")
    else:
        yield fail("python", f"{python}: needs {required_python}", INSTALL, ExitCode.CONFIG)
    wrong = _mismatches(required)
    for needed, version in wrong:
        problem = f"{version} is not {needed.specifier}" if version else "is not installed"
        yield fail("packages", f"{needed.name} {problem}", INSTALL, ExitCode.CONFIG)
    tested = [line for line in LOCK.read_text().splitlines() if line and line[0] not in "#- "] if LOCK.exists() else []
    if other := [
        f"{each.name} {version} ({str(each.specifier)[2:]} there)"
        for each, version in _mismatches(tested)
        if version and not FROM_TORCH.match(each.name)
    ]:
        more = f" and {len(other) - 5} more" if len(other) > 5 else ""
        yield warn("packages", f"not as in requirements.lock: {', '.join(other[:5])}{more}", INSTALL)
    elif not wrong:
        as_what = "in requirements.lock" if tested else "required"
        yield ok("packages", f"as {as_what}: {', '.join(f'{name} {metadata.version(name)}' for name in SHOWN)}")


def _mismatches(lines: Iterable[str]) -> list[tuple[Requirement, str | None]]:
    """Return the requirements that are not met, each with the installed version, or None if it is not installed.

    lines: requirements as in requirements.txt. Those for other systems or for extras are skipped. If several copies of
    a package are installed, the first on sys.path counts, because it is the one that is imported. A pre-release also
    counts as its base version: 2.9.0a0, the version in some containers, satisfies >=2.9.
    """
    found: list[tuple[Requirement, str | None]] = []
    for needed in map(Requirement, lines):
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            version = None
        names = [version, Version(version).base_version] if version else []
        if not any(needed.specifier.contains(name, prereleases=True) for name in names):
            found.append((needed, version))
    return found


def torch_found() -> Iterator[Finding]:
    """Yield one finding (a line marked ok): the version of torch, its CUDA version, its folder, and what it lacks.

    What it lacks are features of Dyad that need a newer torch.
    """
    import torch
    from torch._C._distributed_c10d import FakeProcessGroup, ProcessGroupGloo

    from dyad.train.distributed.sharding import FINALIZED

    needed = {
        "the kernels of the loss (torch 2.11)": Version(torch.__version__) >= Version("2.11.0a0"),
        "one averaging of a shared sharded tower instead of two": FINALIZED,
        "errors of NCCL before the next collective": hasattr(ProcessGroupGloo, "get_error"),
        "plan.gpus and plan.dry_run (torch 2.15)": hasattr(FakeProcessGroup.Options, "simulate_uniform_ranks"),
    }
    lacking = ", ".join(what for what, there in needed.items() if not there)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    where = Path(torch.__file__).parent
    yield ok("torch", f"{torch.__version__}, {built}, {where}{lacking and f'; lacks {lacking}'}")


def devices(precision: str) -> Iterator[Finding]:
    """Check that torch can use the GPUs, and that `precision` suits the device. If torch can use no GPU, report why.

    It fails if the machine has a GPU that torch cannot use, unless CUDA_VISIBLE_DEVICES hides it. precision: auto,
    fp32, bf16 or fp16; "" if there is no configuration.
    """
    import torch

    from dyad.train.distributed.devices import cuda_usable, describe_first_gpu, gpu_problem, gpus_hidden

    if cuda_usable():
        yield from _gpus(precision)
        return
    if problem := gpu_problem():
        yield fail("devices", *problem)
    elif gpus_hidden() and describe_first_gpu():
        yield ok("devices", "CUDA_VISIBLE_DEVICES hides the GPUs: the CPU trains")
    else:
        yield ok("devices", f"no GPU: torch {torch.__version__} on {available_cores()} cores")
    if precision == "fp16":
        yield warn("precision", "fp16 is for GPUs", "precision=bf16 or fp32 on a CPU")


def _gpus(precision: str) -> Iterator[Finding]:
    """Yield one finding (a line marked ok, warn or fail, with a fix) per GPU: whether it suits torch and `precision`.

    It fails if torch is not built for the GPU, and warns if precision is "bf16" and the GPU computes that in software.
    """
    import torch

    built = torch.cuda.get_arch_list()
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        name = f"cuda:{number} {found.name}, {size_text(found.total_memory)}, sm_{found.major}{found.minor}"
        if built and not any(arch.startswith(f"sm_{found.major}") for arch in built):
            yield fail("devices", f"{name}: torch {torch.__version__} is built for {', '.join(built)}", INSTALL)
        elif precision == "bf16" and found.major < 8:
            yield warn("devices", f"{name}: computes bf16 in software", "precision=fp16")
        else:
            yield ok("devices", f"{name}, CUDA {torch.version.cuda}")


def kernels() -> Iterator[Finding]:
    """Check that Triton compiles and runs a kernel on the first GPU; it is a warning if not.

    The loss takes longer then. Without a GPU nothing is yielded. Sets the folders of torch's and Triton's compile
    caches for this process.
    """
    if gpu_count():
        import torch

        from dyad.train.distributed.compile_caches import use_local_caches
        from dyad.train.losses.sums.triton_setup import compile_problem

        use_local_caches()
        text, _, fix = compile_problem(torch.device("cuda", 0)).partition(". Fix: ")
        done = ok("kernels", "Triton compiles and runs one")
        yield warn("kernels", f"{text}: the loss takes longer", fix) if text else done


def gpu_count() -> int:
    """Return the number of GPUs that torch can use, 0 if it can use none."""
    import torch

    from dyad.train.distributed.devices import cuda_usable

    return torch.cuda.device_count() if cuda_usable() else 0


def threads() -> Iterator[Finding]:
    """Yield one finding (a line marked ok or warn): warn if training would start more torch threads than CPU cores.

    Under torchrun, the threads of all processes of this machine count; the cores are those that this job may use.
    """
    import torch

    usable = min(available_cores(), core_quota())
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    wanted = torch.get_num_threads() * processes
    name = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}" if "OMP_NUM_THREADS" in os.environ else "torch"
    shown = f"{wanted} threads ({name}, {processes} process{'es' * (processes > 1)}) on {usable:g} cores"
    if wanted > max(usable, 1):
        fix = f"export OMP_NUM_THREADS={max(int(usable) // processes, 1)}"
        yield warn("threads", f"{shown}: they wait for each other", fix)
    else:
        yield ok("threads", shown)


def open_files() -> Iterator[Finding]:
    """Yield one finding (a line marked ok, warn or fail, with a fix): whether a process may open enough files.

    Each loader process keeps up to 256 shards (data files) open. It fails below 256, and warns below 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    fix = f"ulimit -n {hard if 0 < hard < 65536 else 65536}"
    if limit < LEAST_FILES:
        yield fail("open files", f"at most {limit}: shards and sockets need {LEAST_FILES} and more", fix)
    elif limit < GOOD_FILES:
        yield warn("open files", f"at most {limit}: too few for many shards", fix)
    else:
        yield ok("open files", f"at most {limit}")


def faiss_kind() -> Iterator[Finding]:
    """Check that exactly one faiss package is installed, else fail; warn if there is a GPU that it does not support."""
    names = sorted({each.name for each in metadata.distributions() if str(each.name).startswith("faiss")})
    kind = "gpu" if gpu_count() else "cpu"
    install = INSTALL_EXTRA.format(kind)
    replace = f"pip uninstall -y {' '.join(names)}; {install}"
    if len(names) > 1:
        yield fail("faiss", f"{' and '.join(names)} install the same module over each other", replace, ExitCode.CONFIG)
    elif not names:
        yield fail("faiss", "is not installed: evaluation and mining search with it", install, ExitCode.CONFIG)
    else:
        import faiss

        on_gpu = hasattr(faiss, "StandardGpuResources")
        shown = f"{names[0]} {faiss.__version__}, {'GPU and CPU' if on_gpu else 'CPU'}"
        idle = kind == "gpu" and not on_gpu
        yield warn("faiss", f"{shown}: searches leave the GPU idle", replace) if idle else ok("faiss", shown)


def shared_memory(workers: int | None, batch_bytes: int, folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Check that the free shared memory holds the batches that the loader processes prepare: twice batch_bytes.

    With workers=0 it is always ok. Else it fails if the memory holds them not, and with less than 32 MiB, and warns
    below 1 GiB if batch_bytes is 0. workers: the number of loader processes; None: unknown. batch_bytes: bytes of one
    batch, 0 if unknown. folder: where shared memory is mounted; nothing is checked if it does not exist.
    """
    if not folder.is_dir():
        return
    free = shutil.disk_usage(folder).free
    needed = 2 * batch_bytes
    shown = f"{size_text(free)} free"
    fix = "docker run --shm-size=8g (or --ipc=host), mount -o remount,size=8g /dev/shm, or data.workers=0"
    if workers == 0:
        yield ok(str(folder), f"{shown}; no loader process needs it")
    elif free < max(needed, LEAST_SHARED):
        wanted = f"; {workers} workers want up to {size_text(needed)}" if needed else ""
        yield fail(str(folder), f"{shown}{wanted}: loader processes die with a bus error", fix)
    elif not needed and free < GOOD_SHARED:
        yield warn(str(folder), f"{shown}: too little for loaders of large batches", fix)
    else:
        yield ok(str(folder), shown)


def disk(topic: str, folder: Path, fix: str) -> Iterator[Finding]:
    """Check free space and write permission of `folder`, or of its nearest parent that exists. No file is written.

    It fails without permission or with less than 100 MiB, and warns below 5 GiB. topic: the name of the check in its
    finding. fix: advice on how to choose another folder.
    """
    path = folder.expanduser().absolute()
    path = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(path).free
    shown = f"{folder}: {size_text(free)} free"
    if not os.access(path, os.W_OK):
        yield fail(topic, f"{folder}: {path} cannot be written", fix, ExitCode.CONFIG)
    elif free < LEAST_DISK:
        yield fail(topic, f"{shown}: the first checkpoint would not fit", fix)
    elif free < GOOD_DISK:
        yield warn(topic, f"{shown}: a few checkpoints of a large model fill it", f"{fix}, checkpoint.keep=1")
    else:
        yield ok(topic, shown)


def size_text(count: float) -> str:
    """Return `count` bytes as text with a fitting unit, e.g. "512 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
