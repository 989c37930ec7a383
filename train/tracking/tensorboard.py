"""The TensorBoard tracker, which writes event files to `tensorboard/` in the run folder."""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from dyad.data.base.errors import ConfigError
from dyad.train.config import TrackingConfig
from dyad.train.panels import Panels
from dyad.train.tracking.background import TrackedRun, Tracker
from dyad.train.tracking.progress import Record


class TensorBoard(Tracker):
    """Writes all metrics as scalars, and histograms of similarity scores.

    TensorBoard hides the events that the run wrote past `run.first_step` before it was stopped.
    """

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        self.where = f"tensorboard --logdir {folder}"
        self._writer = SummaryWriter(str(folder), purge_step=run.first_step + 1)
        self._step = run.first_step

    @staticmethod
    def is_on(config: TrackingConfig) -> bool:
        if config.tensorboard and find_spec("tensorboard") is None:
            raise ConfigError("tracking.tensorboard=true needs the package: pip install tensorboard")
        return config.tensorboard

    def log(self, record: Record) -> None:
        self._step = int(record["step"])
        for name, value in record.items():
            if name not in ("step", "time"):  # TensorBoard has its own
                self._writer.add_scalar(name, value, self._step)

    def conclude(self, panels: Sequence[Panels], report: Path | None) -> None:
        """Write the histograms of similarity scores in `panels` to TensorBoard.

        Galleries and tables are shown only by report.html and W&B.
        """
        for shown in panels:
            for kind, (edges, counts) in shown.histograms.items():
                middles = np.repeat([(low + high) / 2 for low, high in pairwise(edges)], np.asarray(counts, int))
                if len(middles):
                    self._writer.add_histogram(
                        f"scores/{shown.dataset}_{kind}", middles, self._step, bins=cast(Any, edges)
                    )

    def close(self, failed: bool) -> None:
        self._writer.close()
