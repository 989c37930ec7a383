"""Log-weights of candidates by how they were sampled: from the caller, or from a file by sample id."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.errors import ConfigError, DataError
from train.losses.options.softmax import Importance, OneSidedDPMOptions
from train.losses.strip import Strip


class SampleTable:
    """One number per sample id, from an .npy file. Raises DataError when it is not one."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        try:
            values = np.load(self._path, allow_pickle=False, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as .npy: {error}") from error
        if values.ndim != 1 or values.dtype.kind != "f":
            raise DataError(f"{path} holds {values.dtype} {values.shape}: one float for each sample id is needed")
        self._values = values

    def of_columns(self, strip: Strip, like: Tensor) -> Tensor:
        """(M,) values of the pairs of all ranks. A collective; what is wrong on one rank is raised on all."""
        if strip.sample_ids_b is None:
            raise ConfigError(f"{self._path} holds values by sample id: give the objective sample_ids")
        ids = strip.rows.gather(strip.sample_ids_b).cpu().numpy()
        outside = ids[(ids < 0) | (ids >= len(self._values))]
        if len(outside):
            raise DataError(f"{self._path} has {len(self._values)} values: no sample id {outside[0]}")
        values = np.asarray(self._values[ids])
        if not np.isfinite(values).all():
            raise DataError(f"{self._path}: the value of sample id {ids[~np.isfinite(values)][0]} is not finite")
        return torch.from_numpy(values).to(like)


class LogWeights:
    """ω_j of all columns, (M,): −log q_j, or ζ_j/τ; values of own columns are the caller's or the file's.

    None with importance=none.
    """

    def __init__(self, options: OneSidedDPMOptions) -> None:
        self._importance = options.importance
        self._table = None if options.importance_file is None else SampleTable(options.importance_file)

    def __call__(self, strip: Strip, scale: Tensor, given: Tensor | None) -> Tensor | None:
        if self._importance is Importance.none:
            if given is not None:
                raise ConfigError("objective.importance=none: set it to log_q or zeta, or give no importance")
            return None
        values_M = self._values(strip, scale, given)
        return -values_M if self._importance is Importance.log_q else scale * values_M

    def _values(self, strip: Strip, scale: Tensor, given: Tensor | None) -> Tensor:
        own, name = strip.columns.sizes[strip.columns.rank], self._importance.value
        if len(strip.y_MD) != strip.columns.total:
            raise ConfigError(f"objective.importance={name}: further columns have no weight")
        if given is None and self._table is None:
            raise ConfigError(
                f"objective.importance={name}: give the objective importance=(m,) values of own columns, or set "
                "objective.importance_file"
            )
        if given is None:
            assert self._table is not None
            return self._table.of_columns(strip, scale)
        if given.shape != (own,):
            raise ConfigError(f"objective.importance: {tuple(given.shape)} values for {own} columns of this rank")
        values_M = strip.columns.gather(given.to(scale.dtype))
        if not values_M.isfinite().all():
            raise ValueError(f"importance must be finite, not {float(values_M[~values_M.isfinite()][0])}")
        return values_M
