"""torchrun's agent: starts the trainers of this machine once all machines of the job are there.

launch/torchrun.sh runs it in place of torch.distributed.run. It takes the same options, and prints a line where torch
prints a page.
"""

import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread, Timer

from dyad.data.base.errors import ExitCode, HardwareError, exit_with, first_line

SILENCE = 10.0  # seconds without trainers until the agent prints that it waits; also for the answer of a TCPStore


def main() -> None:
    """Run torchrun's agent with the options of the command line.

    Exits with code 1 if a trainer of this machine failed, and with HARDWARE if the machines do not meet.
    """
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = level or "FATAL"  # while torch is imported: a TCPStore prints its C++ stack
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    os.environ["TORCH_CPP_LOG_LEVEL"] = level or "ERROR"  # of the trainers
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # it repeats our line
    options, own = parse_args(None), socket.gethostname()
    meeting = f"the other machines (NNODES={options.nnodes}) at {options.rdzv_endpoint}"
    try:
        if not options.standalone:
            _look_for_first_machine(options.rdzv_endpoint)
            waiting = Timer(SILENCE, _print_if_no_trainers, [f"{own} waits for {meeting}"])
            waiting.daemon = True
            waiting.start()
        run(options)
        # exit_with(everywhere=True) looks like success to torch
        if not options.standalone and (code := Path(os.environ["DYAD_EXIT_CODE"]).read_text()):
            print(f"{own} ended with code {code}: rank 0 prints the reason", file=sys.stderr)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        print(f"{own}: rank {rank} {how}", file=sys.stderr)
        sys.exit(1)
    except HardwareError as error:
        print(f"error: {own}: {error}", file=sys.stderr)
        exit_with(ExitCode.HARDWARE)
    except (RendezvousError, dist.DistError) as error:
        reason = first_line(error.__cause__ or error)
        print(f"error: {own} has no contact to {meeting}, given dist.start_timeout: {reason}", file=sys.stderr)
        exit_with(ExitCode.HARDWARE)


def _look_for_first_machine(endpoint: str) -> None:
    """Raise HardwareError if MASTER_ADDR has no address, or if another program answers at MASTER_PORT.

    The first machine need not answer yet. endpoint: MASTER_ADDR:MASTER_PORT.
    """
    from torch._C._distributed_c10d import TCPStore

    host, port = endpoint.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), SILENCE).close()
    except socket.gaierror as error:
        raise HardwareError(f"MASTER_ADDR={host} cannot be resolved: {error.strerror}") from error
    except OSError:
        return
    found = Event()

    def connect() -> None:
        with suppress(RuntimeError):
            TCPStore(host, int(port), timeout=timedelta(seconds=SILENCE), wait_for_workers=False)
            found.set()

    Thread(target=connect, daemon=True).start()  # TCPStore waits for the first answer without a limit
    if not found.wait(SILENCE):
        raise HardwareError(f"MASTER_PORT={port}: another program answers at {endpoint}. Choose another port")


def _print_if_no_trainers(text: str) -> None:
    if not any(path.read_text() for path in Path("/proc/self/task").glob("*/children")):
        print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
