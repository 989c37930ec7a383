"""Read and write safetensors files with one number for each of n items, log q or ζ, which objectives read.

    keys     int64 (n,), ascending: the content keys (64-bit hashes) of the items
    log_q    float64 (n,): log of the probability with which an item is drawn; or
    zeta     float64 (n,): ζ, where ζ/τ is an item's log-weight at temperature τ

The metadata of a file of `python -m data weights` have one key, "dyad": JSON that names the data from which the file
was made.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.base.files import checked_path, write_bytes
from dyad.data.base.json_text import parse_json

LOG_Q, ZETA = "log_q", "zeta"
FORMAT = 1
_KEYS, _FACTS = "keys", "dyad"


@dataclass(frozen=True)
class LogWeights:
    """A file with one finite number for each of n ≥ 1 items.

    The number is log q, the log-probability of the item under a distribution q, or ζ, by which the item has weight
    e^(ζ/τ) as a candidate (NUCLR). path: path of the file. name: what the numbers are, LOG_Q or ZETA. keys_n (n,)
    int64: content keys of the items, ascending. values_n (n,) float64: the numbers. facts: the metadata of the file; in
    one of `python -m data weights` they have "data", a summary of the data from which it was made, and the options of
    the command; in others these may be missing.
    """

    path: str
    name: str
    keys_n: np.ndarray
    values_n: np.ndarray
    facts: Mapping[str, Any] = field(default_factory=dict)

    def of(self, keys_k: np.ndarray, absent: float | None = None) -> np.ndarray:
        """Return the numbers of the items with content keys keys_k (k,) int64, in their order, as float64 (k,).

        absent: the number of an item that is not in the file; None: raise DataError for such an item.
        """
        index_k = np.searchsorted(self.keys_n, keys_k).clip(max=len(self.keys_n) - 1)
        missing_k = self.keys_n[index_k] != keys_k
        if absent is not None:
            return np.where(missing_k, absent, self.values_n[index_k])
        if missing_k.any():
            raise DataError(
                f"{self.path}: no {self.name} of the item with content key {keys_k[missing_k][0]}. Make the "
                "file of the data that is trained on, with add=1 for negatives and corpus=FILE for mined ones"
            )
        return self.values_n[index_k]


def write_log_weights(weights: LogWeights) -> None:
    """Write `weights` to the file weights.path atomically, over an older file. Equal numbers and facts give equal
    bytes.

    Nothing is checked: keys and numbers must be as LogWeights says. Raises OSError if writing fails.
    """
    from safetensors.numpy import save

    arrays = {_KEYS: weights.keys_n.astype("<i8"), weights.name: weights.values_n.astype("<f8")}
    facts = json.dumps({"format": FORMAT, **weights.facts}, sort_keys=True)
    write_bytes(Path(weights.path), save(arrays, {_FACTS: facts}))


def read_log_weights(path: str, name: str = LOG_Q) -> LogWeights:
    """Read the file `path`, whose numbers must be of the kind `name`: LOG_Q or ZETA.

    The result takes 16 bytes of memory per item. Raises ConfigError for a file that does not exist or lacks this kind
    of numbers; DataError for a file that cannot be read or has another format number, for keys that are not int64 (n,),
    n ≥ 1, ascending, and for numbers that are not floats (n,), all finite.
    """
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(checked_path(os.path.expanduser(path)), "numpy")
        facts = parse_json((file.metadata() or {}).get(_FACTS, "{}"))
        arrays = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118  it is no mapping
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read as .safetensors: {error}") from error
    except (AttributeError, TypeError) as error:  # of safetensors, for a dtype that NumPy lacks, such as bfloat16
        raise DataError(f"{path}: {error}: {_KEYS} as int64 and {name} as float64 are needed") from error
    if name not in arrays or _KEYS not in arrays:
        raise ConfigError(f"{path} has the arrays {', '.join(arrays) or 'none'}: {_KEYS} and {name} are needed")
    keys_n, values_n = arrays[_KEYS], arrays[name]
    if keys_n.dtype != np.int64 or keys_n.ndim != 1 or values_n.dtype.kind != "f" or values_n.shape != keys_n.shape:
        raise DataError(
            f"{path}: {_KEYS} are {keys_n.dtype} {keys_n.shape} and {name} {values_n.dtype} {values_n.shape}: int64 "
            "(n,) and float64 (n,) are needed"
        )
    if not len(keys_n) or (keys_n[1:] <= keys_n[:-1]).any():
        raise DataError(f"{path}: {_KEYS} must be at least one, ascending, each once")
    if not np.isfinite(values_n).all():
        bad = keys_n[~np.isfinite(values_n)][0]
        raise DataError(f"{path}: {name} of the item with content key {bad} is not finite")
    if not isinstance(facts, dict) or facts.get("format", FORMAT) != FORMAT:
        raise DataError(f"{path}: its facts are not of format {FORMAT}: update Dyad, or make the file anew")
    return LogWeights(path, name, keys_n, values_n.astype(np.float64), facts)
