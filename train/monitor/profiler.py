"""The key profile=N: torch.profiler's trace of N training steps in profile/ of the run folder, with a summary."""

from __future__ import annotations

import gzip
import json
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import profile, schedule

from dyad.data.base.errors import first_line
from dyad.data.base.files import write_bytes
from dyad.train.config import UNTRACED

Step = Callable[..., Mapping[str, float]]
Event = Mapping[str, Any]  # of a Chrome trace; times in microseconds

# Part of a step → how the names of its ranges in a trace begin
TOWERS = {"towers, forward": "towers forward", "towers, backward": "towers backward"}
PARTS = TOWERS | {"objective": "objective", "optimiser": "Optimizer.", "waiting for data": "enumerate(DataLoader)"}
COLLECTIVES = ("nccl", "gloo:", "c10d::")  # how the names of kernels, ranges and operations of collectives begin


@contextmanager
def traced(
    step: Step, count: int, folder: Path, rank: int, report: Callable[[Mapping[str, float]], None], log: Callable
) -> Iterator[Step]:
    """Yield a function that calls `step`, and traces `count` of the calls after the first UNTRACED; 0 traces none.

    folder: where the trace and its summary go, named by `rank`. report: takes the numbers of the summary, as metrics.
    log: takes a line that says where the files are.
    """
    if not count:
        yield step
        return
    trace, text = folder / f"trace_rank{rank}.json.gz", folder / f"summary_rank{rank}.txt"

    def write(profiler: profile) -> None:
        try:
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            with gzip.open(trace) as file:
                table, numbers = summary(json.load(file)["traceEvents"])
            order = "self_device_time_total" if "launches" in numbers else "self_cpu_time_total"
            operations = profiler.key_averages().table(order, row_limit=25, max_name_column_width=60)
            write_bytes(text, f"{table}\n\n{operations}".encode())
        except OSError as error:  # a full disk is no reason to stop
            return log(f"profile={count}: {first_line(error)}")
        report(numbers)
        log(
            f"profile={count}: {numbers['outside_towers']:.1%} of a step is outside the towers, see {text}; "
            f"{trace.name} beside it opens at https://ui.perfetto.dev"
        )

    phases = schedule(skip_first=UNTRACED - 1, wait=0, warmup=1, active=count, repeat=1)
    with profile(schedule=phases, on_trace_ready=write) as profiler:  # a run that ends earlier has a shorter trace

        def call(*arguments: Any) -> Mapping[str, float]:
            scalars = step(*arguments)
            profiler.step()
            return scalars

        yield call


def summary(events: Iterable[Event]) -> tuple[str, dict[str, float]]:
    """Return a table of the parts of a step, and metrics by name, from the events of a Chrome trace of whole steps.

    outside_towers: the share of the time in which the towers do not compute: run no kernel of theirs on a GPU, or, on a
    CPU, are not in forward or backward. exposed_comm_time: seconds of a step in which nothing but a collective runs. On
    a GPU also launches, kernels per step. A part has the kernels that were launched during its ranges.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    ranges = [span for span in spans if span["cat"] == "user_annotation"]
    steps = [span for span in ranges if span["name"].startswith("ProfilerStep#")]
    kernels = [span for span in spans if span["cat"] == "kernel"]
    launched = {s["args"].get("correlation"): s["ts"] for s in spans if s["cat"] in ("cuda_runtime", "cuda_driver")}
    operations = [span for span in spans if span["cat"] == "cpu_op" and span["tid"] == steps[0]["tid"]]
    collectives = [span for span in kernels or ranges if span["name"].startswith(COLLECTIVES)]
    work = [span for span in kernels or operations if not span["name"].startswith(COLLECTIVES)]

    count, total = len(steps), _union(steps)
    times = {}
    for part, beginning in PARTS.items():
        found = [span for span in ranges if span["name"].startswith(beginning)]
        if kernels:
            edges = sorted(edge for span in found for edge in (span["ts"], span["ts"] + span["dur"]))
            found = [k for k in work if bisect(edges, launched.get(k["args"]["correlation"], -1.0)) % 2]
        times[part] = _union(found)
    numbers = {
        "outside_towers": 1 - sum(times[part] for part in TOWERS) / total,
        "exposed_comm_time": (_union([*work, *collectives]) - _union(work)) / count / 1e6,
        **({"launches": len(kernels) / count} if kernels else {}),
    }
    lines = {**times, "the rest": total - sum(times.values()), "a step": total}
    table = [f"{part:<18}{us / count / 1000:10.2f} ms{us / total:9.1%}" for part, us in lines.items()]
    return "\n".join([*table, *(f"{name} {value:.4g}" for name, value in numbers.items())]), numbers


def _union(spans: Iterable[Event]) -> float:
    """Return the microseconds in which at least one of the spans runs."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted((span["ts"], span["ts"] + span["dur"]) for span in spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
