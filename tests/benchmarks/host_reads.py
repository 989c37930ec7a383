"""Where a step would make the host wait for a GPU: reads, blocking copies and collectives of each objective.

python -m tests.benchmarks.host_reads [FILE]

Counted on CPU tensors with one and two processes (tests/helpers/host_reads.py says how), in a minute. FILE: where the
places in the code are written too, as JSON. DDP's buckets are not among the collectives.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.helpers.dist import printed

Census = dict[str, dict[str, dict[str, int]]]


def census(processes: int) -> Census:
    """Count in `processes` processes: case → {"reads", "copies", "collectives"} → place → how often."""
    lines = printed("host_reads_job.py", processes).splitlines()
    return json.loads(next(line for line in lines if line.startswith("{")))


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
