"""A Parquet file of kilobytes in which many rows share one large value is read without gigabytes of memory."""

from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dyad.data.tables import readers


def test_a_value_that_rows_share_is_held_once(tmp_path: Path) -> None:
    rows, large = 2000, 1 << 20
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * large]))
    # without the schema of pyarrow, which would ask for a dictionary itself
    pq.write_table(
        pa.table({"anchor": shared, "positive": shared}), tmp_path / "t.parquet", compression="zstd", store_schema=False
    )
    assert (tmp_path / "t.parquet").stat().st_size < 1 << 16
    held = [batch.nbytes for batch in islice(readers._batches(str(tmp_path / "t.parquet")), 1, None)]
    assert sum(held) < 10 * len(held) * large and len(held) >= rows // readers.BATCH
    _, fields = next(readers.open_table(str(tmp_path / "t.parquet")).rows())
    assert isinstance(fields, dict) and fields["anchor"] == fields["positive"] == "x" * large
