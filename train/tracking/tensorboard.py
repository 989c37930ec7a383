"""The TensorBoard tracker, which writes event files to `tensorboard/` in the run folder."""

from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from dyad.data.base.errors import ConfigError, printable
from dyad.data.base.files import open_foreign
from dyad.train.config import TrackingConfig
from dyad.train.tracking.background import TrackedRun, Tracker
from dyad.train.tracking.panel_types import Cell, Grid, Panels, Thumbnail
from dyad.train.tracking.progress import Record

LARGEST = 1 << 20  # pixels of a thumbnail


class TensorBoard(Tracker):
    """The TensorBoard tracker: writes metrics as scalars, and at the end histograms of scores, tables and images.

    TensorBoard hides the events of steps after `run.first_step` that the run wrote before it was stopped and resumed.
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
        """Write the histograms of similarity scores, the galleries and the tables in `panels` to TensorBoard."""
        for shown in panels:
            tables = {**shown.galleries, "confusion": shown.confusion, "classes": shown.classes}
            for title, grid in tables.items():
                if grid is not None:
                    self._write_grid(f"{shown.dataset}/{title}", grid)
            for kind, (edges, counts) in shown.histograms.items():
                middles = np.repeat([(low + high) / 2 for low, high in pairwise(edges)], np.asarray(counts, int))
                if len(middles):
                    self._writer.add_histogram(
                        f"scores/{shown.dataset}_{kind}", middles, self._step, bins=cast(Any, edges)
                    )

    def _write_grid(self, tag: str, grid: Grid) -> None:
        """Write a table as Markdown text under `tag`, and each image in it under "<tag>/<row number> <column>".

        Row numbers count from 1. Raises OSError or DataError for a thumbnail that cannot be read.
        """
        from dyad.data.image_text.decode import decode

        self._writer.add_text(tag, markdown(grid), self._step)
        for number, row in enumerate(grid.rows, start=1):
            for column, cell in zip(grid.columns, row, strict=True):
                if isinstance(cell, Thumbnail):
                    with open_foreign(cell.path) as file:
                        pixels = decode(file.read(), LARGEST)
                    self._writer.add_image(f"{tag}/{number} {column}", pixels, self._step)

    def close(self, failed: bool) -> None:
        self._writer.close()


def markdown(grid: Grid) -> str:
    """Return a table in Markdown. HTML in texts is escaped, so that it has no effect; images become their captions.

    Each cell is one line: runs of white space become one blank. None becomes an empty cell.
    """

    def shown(cell: Cell) -> str:
        text = cell.caption if isinstance(cell, Thumbnail) else "" if cell is None else str(cell)
        return escape(printable(" ".join(text.split()))).replace("|", r"\|")

    rows = [[*grid.columns], ["---"] * len(grid.columns), *grid.rows]
    return "\n".join(f"| {' | '.join(map(shown, row))} |" for row in rows)
