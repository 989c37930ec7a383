"""TensorBoard: event files in `tensorboard/` of the run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from dyad.train.panels import Panels
from dyad.train.tracking.progress import Record


class TensorBoard:
    """A Tracker. TensorBoard hides what an earlier start of the run wrote past `first_step`."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run_dir / "tensorboard"
        self.where, self.rest = f"tensorboard --logdir {folder}", ""
        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)
        self._step = first_step

    def log(self, record: Record) -> None:
        self._step = int(record["step"])
        for name, value in record.items():
            if name != "step":
                self._writer.add_scalar(name, value, self._step)

    def conclude(self, panels: Sequence[Panels], report: Path | None) -> None:
        """Histograms of the scores. Galleries and tables are in report.html and W&B only."""
        for shown in panels:
            for kind, (edges, counts) in shown.histograms.items():
                self._histogram(f"scores/{shown.dataset}_{kind}", edges, counts)

    def _histogram(self, tag: str, edges: Sequence[float], counts: Sequence[float]) -> None:
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        self._writer.add_histogram_raw(
            tag,
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(m * n for m, n in zip(middles, counts, strict=True)),
            sum_squares=sum(m * m * n for m, n in zip(middles, counts, strict=True)),
            bucket_limits=list(edges[1:]),
            bucket_counts=list(counts),
            global_step=self._step,
        )

    def close(self, failed: bool) -> None:
        self._writer.close()
