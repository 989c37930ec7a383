"""What torch.profiler sees of a call: where the host waits, when kernels run, and which copies run beside them."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from gpu.bare import synchronize

CALL = "the profiled call"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
Span = tuple[float, float]


@dataclass(frozen=True)
class Seen:
    """Of one call. waits: name of the CUDA function that waits → how often. Seconds: whole, from the start of the call
    to the end of its last kernel; busy, in which a kernel ran; copying, in which inputs were copied to the device; and
    hidden, the part of copying in which a kernel ran, too."""

    waits: Counter[str]
    whole: float
    busy: float
    copying: float
    hidden: float


def profiled(run: Callable[[], object], device: str = "cuda") -> Seen:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    synchronize(device)
    with profile(activities=activities) as profiler:
        with record_function(CALL):
            run()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return seen(json.loads(path.read_text())["traceEvents"])


def seen(events: list[dict[str, Any]]) -> Seen:
    """From the events of a Chrome trace, whose times are µs."""
    (call,) = (span(e) for e in events if e.get("cat") == "user_annotation" and e["name"] == CALL)
    of_runtime = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    waits = Counter(e["name"] for e in of_runtime if e["name"] in WAITS and call[0] <= e["ts"] <= call[1])
    kernels = union(span(e) for e in events if e.get("cat") == "kernel")
    copies = union(span(e) for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"])
    end = max([call[1], *(stop for _, stop in kernels)])
    hidden = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in copies for b in kernels)
    return Seen(waits, (end - call[0]) / 1e6, length(kernels), length(copies), hidden / 1e6)


def span(event: dict[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not overlap."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def length(spans: list[Span]) -> float:
    """In seconds."""
    return sum(stop - start for start, stop in spans) / 1e6
