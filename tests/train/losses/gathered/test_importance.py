"""Files of log q by sample id: which arrays are read, and which batches have a number for each column."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.messages import raises

from dyad.data.base.errors import ConfigError
from dyad.train.losses import build_objective
from dyad.train.losses.objectives.base import Objective


def from_file(folder: Path, values: np.ndarray) -> Objective:
    np.save(folder / "q.npy", values)
    return build_objective("one_sided_dpm", importance="log_q", importance_file=str(folder / "q.npy"))


@pytest.mark.parametrize("dtype", [np.dtype("float64").newbyteorder(), np.longdouble, np.float16])
def test_floats_of_any_kind_are_read(dtype: np.dtype, tmp_path: Path) -> None:
    """torch itself takes no long doubles, and no other order of bytes than that of the machine."""
    x, y, values = torch.randn(4, 3), torch.randn(4, 3), np.random.default_rng(0).normal(size=9).astype(dtype)
    given = torch.from_numpy(values.astype(np.float64))[torch.arange(4)]
    want = build_objective("one_sided_dpm", importance="log_q")(x, y, importance=given).loss
    assert torch.equal(from_file(tmp_path, values)(x, y, sample_ids_b=torch.arange(4)).loss, want)


def test_each_column_needs_a_sample(tmp_path: Path) -> None:
    listed = torch.tensor([[0, 0], [1, 4]])
    with raises(ConfigError, "q.npy"):
        from_file(tmp_path, np.zeros(9))(
            torch.randn(2, 3), torch.randn(5, 3), sample_ids_b=torch.arange(2), positives=listed
        )
