"""The door to files of other people: data/base/files.py alone opens them, by `open_foreign` and its like."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    p for d in ("data", "train", "eval", "dyad") for p in (ROOT / d).rglob("*.py") if "samples" not in p.parts
)
READS = {"read_bytes", "read_text", "memmap", "open_memmap", "load_file", "safe_open", "open"}
LOADS = {("json", "load"), ("np", "load"), ("torch", "load"), ("pickle", "load"), ("yaml", "load")}
# Modules that open something else than a file of a stranger, and what it is
OTHERS = {
    "data/base/files.py": "the door",
    "data/base/errors.py": "the file of the exit code, which launch/torchrun.sh made",
    "data/base/parallel.py": "of Linux: /sys",
    "data/loading/workers.py": "of Linux: /proc",
    "train/step/graph_cache.py": "of Linux: /proc and /sys",
    "data/shards/storage.py": "of a server",
    "train/distributed/consistency.py": "the program's own files",
    "train/distributed/agent.py": "of Linux: /proc, and the file of the exit code",
    "train/distributed/signals.py": "of Linux: /proc, and the file of the exit code",
    "dyad/doctor/machine.py": "the program's own files",
    "dyad/export/dpr.py": "the export that is being written",
    "dyad/export/library.py": "results of the child process that checks an export, in a new folder",
    "dyad/export/reload.py": "the questions of that check",
    "train/losses/gathered/sample_state.py": "a scratch file without a name",
    "train/monitor/profiler.py": "the trace that this process has just written",
    "train/run_folder/run_state.py": "the lock, which is written",
}


def opens(call: ast.Call) -> bool:
    """Whether a call opens a file for reading that the door has not looked at."""
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    owner = getattr(getattr(call.func, "value", None), "id", "")
    if name not in READS and (owner, name) not in LOADS:
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    writes = any(isinstance(each, ast.Constant) and str(each.value)[:1] in [*"wxa"] for each in given)
    writes |= any(isinstance(each, ast.Constant) and each.value == "r+b" for each in given)
    first = ast.unparse(call.args[0]) if call.args else ""
    return not (writes or first.startswith(("checked_path(", "BytesIO(", "os.devnull")))


def found(path: Path) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [f"line {call.lineno}: {ast.unparse(call)}" for call in calls if opens(call)]


def test_files_of_others_are_opened_by_the_door() -> None:
    for path in SOURCES:
        assert bool(found(path)) == (str(path.relative_to(ROOT)) in OTHERS), f"{path}: {found(path)}"


def test_what_counts_as_opening() -> None:
    for text in ("open(a)", "a.open()", "a.open('rb')", "a.read_text()", "json.load(a)", "np.load(a, mmap_mode='r')"):
        assert opens(ast.parse(text, mode="eval").body), text  # type: ignore[arg-type]
    for text in ("a.open('wb')", "open(os.devnull)", "safe_open(checked_path(a), 'pt')", "Image.open(BytesIO(a))"):
        assert not opens(ast.parse(text, mode="eval").body), text  # type: ignore[arg-type]
