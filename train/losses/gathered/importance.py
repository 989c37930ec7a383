"""Importance weights and noise densities from a file: log q or ζ of each candidate, by sample id.

q is the density from which candidates or noise are drawn; ζ/τ is a log-weight of a candidate, as NUCLR learns it.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dyad.data.base.arrays import map_array
from dyad.data.base.errors import ConfigError, DataError
from dyad.train.losses.gathered.batch import GatheredBatch


class SampleTable:
    """One float for each sample id, read from the .npy file `path`.

    Raises DataError if the file cannot be read or does not hold a one-dimensional array of floats.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        try:
            values = map_array(self._path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as .npy: {error}") from error
        if values.ndim != 1 or values.dtype.kind != "f":
            raise DataError(f"{path} holds {values.dtype} {values.shape}: one float for each sample id is needed")
        self._values = values

    def of_columns(self, batch: GatheredBatch, like: Tensor) -> Tensor:
        """Look up the value of every pair of the global batch by its sample id: (M,), M the pairs of all ranks.

        The values are those of the user's .npy file: log q, q the density from which candidates are drawn, or ζ, where
        ζ/τ is the log of a candidate's weight. like: a tensor with the type and device of the result. Every rank must
        call it. Raises ConfigError if the batch has no sample ids, and on all ranks DataError for an id without a
        finite value.
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
