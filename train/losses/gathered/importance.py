"""Importance weights and noise densities from a file: log q or ζ of each candidate, by content key or by sample id.

q is the density from which candidates or noise are drawn; ζ/τ is a log-weight of a candidate, as NUCLR learns it.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dyad.data.base.arrays import map_array
from dyad.data.base.errors import ConfigError, DataError
from dyad.data.log_weights import read_log_weights
from dyad.train.losses.gathered.batch import GatheredBatch
from dyad.train.losses.options.common import ObjectiveOptions
from dyad.train.losses.sums.conditions import holds


def open_number_file(options: ObjectiveOptions, name: str) -> "ItemTable | SampleTable | None":
    """Open the file of numbers that the options name (options.number_file); return None if they name none.

    A .safetensors file becomes an ItemTable (by content key), any other a SampleTable (.npy, by sample id). name: what
    the numbers of a .safetensors file must be, "log_q" or "zeta"; a .npy file does not say what its numbers are. Raises
    ConfigError or DataError if the file cannot be used, see the two classes.
    """
    if options.number_file is None:
        return None
    return ItemTable(options.number_file, name) if options.by_key else SampleTable(options.number_file)


class ItemTable:
    """One float for each item, read from the file `path` (see data/log_weights.py) and found by the item's content key.

    name: what the floats must be, "log_q" or "zeta". Memory: 16 bytes an item, on the host and on the device. Raises
    ConfigError for a file that does not exist or has no such floats, DataError for a damaged file.
    """

    def __init__(self, path: str, name: str) -> None:
        self.weights = read_log_weights(path, name)
        self._keys_n, self._values_n = (torch.from_numpy(a) for a in (self.weights.keys_n, self.weights.values_n))

    def of_columns(self, batch: GatheredBatch, like: Tensor) -> Tensor:
        """Return the value of every column (y item) of the global batch, found by its content key: (M,).

        like: a tensor with the dtype and device of the result. Raises ConfigError if the batch has no keys of y, and
        DataError, on all ranks, for a column whose key the file lacks; within collect_checks(speculative=True) of
        sums/conditions.py the file is assumed to have all keys.
        """
        if (keys_M := batch.y_keys_M) is None:
            raise ConfigError(f"{self.weights.path} holds values by content key: give the objective y_keys")
        self._keys_n, self._values_n = self._keys_n.to(keys_M.device), self._values_n.to(keys_M.device)
        index_M = torch.searchsorted(self._keys_n, keys_M).clamp(max=len(self._keys_n) - 1)
        if not holds((self._keys_n[index_M] == keys_M).all()):
            self.weights.of(keys_M.cpu().numpy())  # raises
        return self._values_n[index_M].to(like)


class SampleTable:
    """One float for each sample id, at the index of the id in the array of the .npy file `path`.

    Raises DataError if the file cannot be read or does not hold a one-dimensional array of floats.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        try:
            values = map_array(self._path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as .npy: {error}") from error
        if values.ndim != 1 or values.dtype.kind != "f":
            raise DataError(f"{path} holds {values.dtype} {values.shape}: one float for each sample id is needed")
        self._values = values

    def of_columns(self, batch: GatheredBatch, like: Tensor) -> Tensor:
        """Return the value of every pair of the global batch, found by its sample id: (M,), M the pairs of all ranks.

        The values are those of the user's .npy file: log q, with q the density from which candidates are drawn, or ζ,
        where ζ/τ is the log of a candidate's weight. like: a tensor with the dtype and device of the result. Every rank
        must call it. Raises ConfigError if the batch has no sample ids, has y items beside the pairs, or other numbers
        of x and y; raises DataError, on all ranks, for an id without a finite value.
        """
        if batch.sample_ids_b is None:
            raise ConfigError(f"{self._path} holds values by sample id: give the objective sample_ids")
        if len(batch.y_MD) != batch.columns.total or batch.rows.sizes != batch.columns.sizes:
            raise ConfigError(f"{self._path} holds values by sample id, and columns of no pair (x_i, y_i) have none")
        ids = batch.rows.gather(batch.sample_ids_b).cpu().numpy()
        outside = ids[(ids < 0) | (ids >= len(self._values))]
        if len(outside):
            raise DataError(f"{self._path} has {len(self._values)} values: no sample id {outside[0]}")
        values = np.asarray(self._values[ids], np.float64)  # torch takes no long doubles and no other order of bytes
        if not np.isfinite(values).all():
            raise DataError(f"{self._path}: the value of sample id {ids[~np.isfinite(values)][0]} is not finite")
        return torch.from_numpy(values).to(like)
