"""restarts.jsonl: the hardware failures of a run (exit code 4), and whether a launch script starts the run again.

One JSON object per failure, {"step": …, "time": …, "cause": …, "hosts": […], "job": …, "restart": …}. step: that of the
newest checkpoint. cause: the error, or UNKNOWN. hosts: the machines of the ranks that failed, as far as known. job: the
job of SLURM or the launch script. restart: 1 for the first restart of that job, 2 for the second, …; 0 if the failure
ended the job. Needs no torch.
"""

import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from dyad.data.base.errors import printable
from dyad.data.base.files import read_lines, write_bytes
from dyad.train.config import DistConfig
from dyad.train.run_folder.folder import FIRST_STEP, recorded_state, saved_config, steps
from dyad.train.run_folder.run_state import append_to_log

RESTARTS = "restarts.jsonl"
UNKNOWN = "killed, or its machine is gone: no rank has written a reason"


def after_failure(folder: Path, job: str, requeued: bool = False) -> bool:
    """Record a hardware failure of the run in `folder` and print it; return whether the run is to start again.

    Call it only if the last start has written run_state.json. The failure is appended to restarts.jsonl and log.txt;
    its cause is the error in run_state.json, UNKNOWN if there is none. The run is to start again if its last start
    wrote a checkpoint and `job` has been restarted fewer than dist.restarts times. job: identifier of the job of SLURM
    or of the launch script. requeued: whether the scheduler has started the job again already, as SLURM does when a
    node is lost; the result is then True, and a failure that is recorded already is not recorded again. Raises
    ConfigError if the folder has no readable config.yaml.
    """
    state = recorded_state(folder)
    first = state.get(FIRST_STEP, state.get("step", 0))  # runs of older versions have no FIRST_STEP
    saved = max(steps(folder), default=0)
    limit = saved_config(folder).get("dist", {}).get("restarts", DistConfig.restarts)
    path = folder / RESTARTS
    earlier = list(read_lines(path, print)) if path.exists() else []
    if requeued and earlier and str(earlier[-1][1].get("time")) >= str(state.get("time")):
        return True  # the job recorded the failure before it was queued again
    restart = 1 + sum(1 for _, entry in earlier if entry.get("job") == job and entry.get("restart"))
    again = requeued or (saved > first and restart <= limit)
    cause = str(state.get("error", "")).partition(": ")[2].partition("\n")[0] or UNKNOWN
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    entry: dict[str, Any] = {"step": saved, "time": now, "cause": cause, "hosts": state.get("hosts", [])}
    entry |= {"job": job, "restart": restart * again}
    write_bytes(path, b"".join(line.rstrip() + b"\n" for line, _ in earlier) + json.dumps(entry).encode() + b"\n")
    if requeued:
        line = f"restart {restart}, by the scheduler, at step {saved:,}: {cause}"
    elif again:
        line = f"restart {restart} of {limit} at step {saved:,}: {cause}"
    elif saved > first:
        line = f"no restart: dist.restarts={limit}"
    else:
        line = f"no restart: no new checkpoint since step {first:,}"
    text = printable("\n".join((line, *_repeated(entry["hosts"], [entry for _, entry in earlier]))))
    print(text)
    append_to_log(folder, text)
    return again


def _repeated(hosts: list[str], earlier: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each machine in `hosts` that failed before, in a job of SLURM, which has others.

    earlier: the entries of restarts.jsonl from before this failure.
    """
    for host in hosts if "SLURM_JOB_ID" in os.environ else []:
        if times := sum(host in entry.get("hosts", []) for entry in earlier):
            yield f"node {host} has failed {times + 1} times in this run: leave it out (SLURM: sbatch --exclude={host})"
