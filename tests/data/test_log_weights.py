"""Files of a number for each item: what is written is read by key, and what no such file holds is refused."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.messages import raises
from safetensors.numpy import save_file

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.log_weights import LOG_Q, ZETA, LogWeights, read_log_weights, write_log_weights

KEYS = np.array([-(2**63), -5, 0, 7, 2**63 - 1])
VALUES = np.log(np.array([0.1, 0.2, 0.3, 0.15, 0.25]))


@pytest.mark.parametrize("name", [LOG_Q, ZETA])
def test_numbers_come_back_by_key_to_the_last_bit(name: str, tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for path in (first, second):
        write_log_weights(LogWeights(str(path), name, KEYS, VALUES, {"data": "abc", "options": "alpha=1"}))
    assert first.read_bytes() == second.read_bytes()
    read = read_log_weights(str(first), name)
    assert read.facts["data"] == "abc"
    order = np.array([4, 0, 0, 2, 3, 1])
    assert (read.of(KEYS[order]) == VALUES[order]).all() and read.of(KEYS[:0]).shape == (0,)
    for key in (-(2**63) + 1, 1, 8):
        with raises(DataError, first, name, str(key), "corpus=", "add="):
            read.of(np.array([0, key]))


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with raises(ConfigError, path):
        read_log_weights(str(path))
    path.write_bytes(b"\x80\x04N.")  # a pickle
    with raises(DataError, path):
        read_log_weights(str(path))
    bad: list[tuple[type[Exception], dict[str, np.ndarray], str]] = [
        (ConfigError, {"keys": KEYS, "zeta": VALUES}, "zeta"),
        (ConfigError, {"log_q": VALUES}, "keys"),
        (DataError, {"keys": KEYS.astype(np.int32), "log_q": VALUES}, "int32"),
        (DataError, {"keys": KEYS, "log_q": VALUES[:4]}, "(4,)"),
        (DataError, {"keys": KEYS[::-1].copy(), "log_q": VALUES}, "keys"),
        (DataError, {"keys": KEYS[[0, 1, 1]], "log_q": VALUES[:3]}, "keys"),
        (DataError, {"keys": KEYS[:0], "log_q": VALUES[:0]}, "keys"),
        (DataError, {"keys": KEYS, "log_q": np.array([0, 1, -np.inf, 2, 3])}, "key 0 "),
    ]
    for error, arrays, named in bad:
        save_file(arrays, path)
        with raises(error, path, named):
            read_log_weights(str(path))
    for facts in ("[]", "{", '{"format": 2}'):
        save_file({"keys": KEYS, "log_q": VALUES}, path, {"dyad": facts})
        with raises(DataError, path):
            read_log_weights(str(path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16])
def test_numbers_of_few_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """NumPy has no bfloat16 and no float8, unless ml_dtypes, which onnx imports, has been there before."""
    path = tmp_path / "w.safetensors"
    tensors = {"keys": torch.from_numpy(KEYS), "log_q": torch.from_numpy(VALUES).to(dtype)}
    safetensors.torch.save_file(tensors, path)
    if dtype is torch.float16:
        assert (read_log_weights(str(path)).values_n == VALUES.astype(np.float16)).all()
        return
    with raises(DataError, path, str(dtype).removeprefix("torch."), "log_q", "float64"):
        read_log_weights(str(path))
