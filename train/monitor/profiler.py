"""The key profile=N: torch.profiler's trace of N training steps in profile/ of the run folder, with a summary.

Times of a trace are in microseconds.
"""

import gzip
import json
import os
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import profile, schedule

from dyad.data.base.errors import first_line
from dyad.train.config import UNTRACED

# Part of a step → the beginning of the names of its ranges (torch.profiler.record_function) in a trace
TOWERS = {"towers, forward": "towers forward", "towers, backward": "towers backward"}
PARTS = TOWERS | {"objective": "objective", "optimiser": "Optimizer.", "waiting for data": "enumerate(DataLoader)"}
TOO_SHORT = "the run ended before a traced step did"
COLLECTIVES = ("nccl", "gloo:", "c10d::")  # how the names of kernels, ranges and operations of collectives begin


@contextmanager
def traced(step: Callable, count: int, folder: Path, rank: int, report: Callable, log: Callable) -> Iterator[Callable]:
    """Context manager that yields a function which calls `step` with its arguments and traces `count` of the calls.

    The function returns what `step` returns. The first UNTRACED calls are not traced. After the last traced call, or at
    the end of the block if that is earlier, trace_rank<rank>.json.gz and summary_rank<rank>.txt are written to
    `folder`, which is made; its parent must exist. report: called with the metrics of `summary`, name → number. log:
    called with a line that says where the files are, or why there is no summary; no error is raised then.
    """

    calls = 0

    def write(profiler: profile) -> None:
        trace, text = folder / f"trace_rank{rank}.json.gz", folder / f"summary_rank{rank}.txt"
        finished = calls - UNTRACED
        try:
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            table, numbers = summary(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"], finished)
            order = "self_device_time_total" if "launches" in numbers else "self_cpu_time_total"
            operations = profiler.key_averages().table(order, row_limit=25, max_name_column_width=60)
            text.write_text(f"{table}\n\n{operations}")
        except Exception as error:  # such as a full disk: no reason to stop a run
            log(f"profile={count}: no summary ({first_line(error)})")
            return
        report(numbers)
        share = f"{numbers['outside_towers']:.1%} of a step is outside the towers, in {finished} steps"
        log(f"profile={count}: {share}: {text}; {trace.name} beside it opens at https://ui.perfetto.dev")

    def call(*arguments: Any) -> Any:
        nonlocal calls
        scalars = step(*arguments)
        calls += 1
        profiler.step()
        return scalars

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # without a GPU its library prints an ERROR that means nothing
    phases = schedule(skip_first=UNTRACED - 1, wait=0, warmup=1, active=count, repeat=1)
    with profile(schedule=phases, on_trace_ready=write) as profiler:
        yield call
    if calls < UNTRACED:  # torch has called nothing
        log(f"profile={count}: no summary ({TOO_SHORT})")


def summary(events: Iterable[dict[str, Any]], finished: int) -> tuple[str, dict[str, float]]:
    """Return (a table of the time of each part of a step, as text; metrics by name) from the events of a Chrome trace.

    events: those that torch.profiler exports, with the ranges that PARTS names and a range for each step. finished: how
    many steps of the trace have finished; later events, such as those of the end of a run, are left out. Raises
    ValueError if no step has finished. Numbers per step are means over the finished steps.

    The metrics: outside_towers, the share of the time in which no kernel of the towers runs on the GPU or, on a CPU, no
    tower is in forward or backward; exposed_comm_time, the seconds of a step in which only collectives run; on a GPU
    also launches, the number of kernels per step. A kernel belongs to the part in whose ranges it was launched.
    """
    of: dict[str, list[Any]] = defaultdict(list)
    spans = [event for event in events if event.get("ph") == "X"]
    steps = [span for span in spans if span["cat"] == "user_annotation" and span["name"].startswith("ProfilerStep#")]
    steps = sorted(steps, key=lambda span: span["ts"])[: max(finished, 0)]
    if not steps:
        raise ValueError(TOO_SHORT)
    end = steps[-1]["ts"] + steps[-1]["dur"]
    for span in (span for span in spans if span["ts"] < end):
        of[span["cat"]].append(span)
    ranges, kernels = of["user_annotation"], of["kernel"]
    launched = {s["args"].get("correlation"): s["ts"] for s in of["cuda_runtime"] + of["cuda_driver"]}
    compute = kernels or [span for span in of["cpu_op"] if span["tid"] == steps[0]["tid"]]
    work = [span for span in compute if not span["name"].startswith(COLLECTIVES)]
    collectives = [span for span in kernels or ranges if span["name"].startswith(COLLECTIVES)]
    total, times = _union(steps), {}
    for part, beginning in PARTS.items():
        found = [span for span in ranges if span["name"].startswith(beginning)]
        if kernels:
            edges = sorted(edge for span in found for edge in (span["ts"], span["ts"] + span["dur"]))
            found = [k for k in work if bisect(edges, launched.get(k["args"]["correlation"], -1.0)) % 2]
        times[part] = _union(found)
    exposed = (_union([*work, *collectives]) - _union(work)) / len(steps) / 1e6
    numbers = {"outside_towers": 1 - sum(times[part] for part in TOWERS) / total, "exposed_comm_time": exposed}
    numbers |= {"launches": len(kernels) / len(steps)} if kernels else {}
    lines = {**times, "the rest": total - sum(times.values()), "a step": total}
    table = [f"{part:<18}{us / len(steps) / 1000:10.2f} ms{us / total:9.1%}" for part, us in lines.items()]
    return "\n".join([*table, *(f"{name} {value:.4g}" for name, value in numbers.items())]), numbers


def _union(spans: Iterable[dict[str, Any]]) -> float:
    """Return the microseconds in which at least one span runs. spans: trace events with "ts" (start) and "dur"."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted((span["ts"], span["ts"] + span["dur"]) for span in spans):
        total, reached = total + max(0.0, stop - max(start, reached)), max(reached, stop)
    return total
