"""Baselines: the model with its weights before training, and what happens if a baseline fails."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dyad.data.base.errors import ExitCode, UserError, printable
from dyad.eval.config import Baseline
from dyad.eval.encode.encoder import Encoder
from dyad.train.distributed.agreement import raise_on_all
from dyad.train.distributed.failures import PeerFailure
from dyad.train.distributed.world import World


def untrained_encoder(untrained: Callable[[], Encoder] | None, world: World) -> Encoder | None:
    """Return the encoder with its weights before training; None if `untrained` is None or fails with a UserError.

    untrained: function that makes the encoder; if it raises a UserError, a line on stderr says why. None: this baseline
    is not wanted. All processes must call it together. Raises the errors that `skip_on_error` lets through.
    """
    if untrained:
        with skip_on_error(Baseline.untrained):
            return raise_on_all(world, untrained)
    return None


@contextmanager
def skip_on_error(baseline: Baseline) -> Iterator[None]:
    """Context manager: suppress a UserError of the block, and print on stderr that `baseline` is left out, and why.

    The error is raised again if another process failed (PeerFailure) or if the job must be started again (exit code
    REQUEUE). If another process prints the error, nothing is printed.
    """
    try:
        yield
    except UserError as error:
        if isinstance(error, PeerFailure) or error.exit_code is ExitCode.REQUEUE:
            raise
        if not error.printed_elsewhere:
            print(f"left out: the baseline {baseline}: {printable(str(error))}", file=sys.stderr)
