"""Importance weights and noise densities from a file: log q or ζ of each candidate, by sample id.

q is the density from which candidates or noise are drawn; ζ/τ is a log-weight of a candidate, as NUCLR learns it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dyad.data.base.errors import ConfigError, DataError
from dyad.train.losses.gathered.batch import GatheredBatch


class SampleTable:
    """One float per sample id, from an .npy file. Raises DataError when the file holds something else."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        try:
            values = np.load(self._path, allow_pickle=False, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as .npy: {error}") from error
        if values.ndim != 1 or values.dtype.kind != "f":
            raise DataError(f"{path} holds {values.dtype} {values.shape}: one float for each sample id is needed")
        self._values = values

    def of_columns(self, batch: GatheredBatch, like: Tensor) -> Tensor:
        """Return the table's values for the pairs of all ranks, (M,) in the type of `like`. Collective.

        Raises ConfigError without sample ids and DataError for ids without a finite value, on all ranks.
        """
        if batch.sample_ids_b is None:
            raise ConfigError(f"{self._path} holds values by sample id: give the objective sample_ids")
        ids = batch.rows.gather(batch.sample_ids_b).cpu().numpy()
        outside = ids[(ids < 0) | (ids >= len(self._values))]
        if len(outside):
            raise DataError(f"{self._path} has {len(self._values)} values: no sample id {outside[0]}")
        values = np.asarray(self._values[ids])
        if not np.isfinite(values).all():
            raise DataError(f"{self._path}: the value of sample id {ids[~np.isfinite(values)][0]} is not finite")
        return torch.from_numpy(values).to(like)
