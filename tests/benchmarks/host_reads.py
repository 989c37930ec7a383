"""Where a step would make the host wait for a GPU: reads, blocking copies and collectives of each objective.

python -m tests.benchmarks.host_reads [FILE]

Counted on CPU tensors with one and two processes (tests/helpers/host_reads.py says how), in a minute. FILE: where the
places in the code are written too, as JSON. DDP's buckets are not among the collectives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
Census = dict[str, dict[str, dict[str, int]]]


def census(processes: int) -> Census:
    """Count in `processes` processes: case → {"reads", "copies", "collectives"} → place → how often."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    run = subprocess.run(
        [sys.executable, *start, str(ROOT / "tests/jobs/host_reads_job.py")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))


def main() -> None:
    one, two = census(1), census(2)
    print("| objective | reads, W = 1 | copies | reads, W = 2 | copies | collectives |\n|---|---|---|---|---|---|")
    for case in one:
        counts = [sum(one[case][kind].values()) for kind in ("reads", "copies")]
        counts += [sum(two[case][kind].values()) for kind in ("reads", "copies", "collectives")]
        print(f"| {case} | {' | '.join(map(str, counts))} |")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({"1": one, "2": two}, indent=1))


if __name__ == "__main__":
    main()
