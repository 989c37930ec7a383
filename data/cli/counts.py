"""Count training samples where that is quick, so that a run with too large a batch is refused before torch loads."""

import os
from collections.abc import Sequence

from dyad.data.question_passage.judgements import is_qrels, judgements
from dyad.data.shards.index import scan_stream, stored_index
from dyad.data.shards.scan_rows import RowScan
from dyad.data.shards.storage import open_buffered, scheme_of
from dyad.data.tables.folders import tables_of

SMALL = 16 << 20  # the most bytes that are read to count samples


def most_samples(files: Sequence[str], columns: Sequence[str]) -> int | None:
    """Return the most samples that files and tables can have; None if this is not known quickly.

    Bad rows of tables are counted, and of a file of judgements (qrels) each question with a grade above 0, also one of
    an unknown id. It is not known if a file is remote, or if it has no index and is large or damaged. Stores nothing.
    columns: the setting data.columns. Raises ConfigError for a missing file, DataError for one that cannot be read.
    """
    counts = [_count(file, columns) for file in files]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _count(file: str, columns: Sequence[str]) -> int | None:
    """Return the number of samples of one file or table as `most_samples` does."""
    if scheme_of(file):
        return None
    if is_qrels(file):
        return len({question for _, (question, _), grade in judgements(file) if grade > 0})
    tables = tables_of(file, columns)
    if not tables and (index := stored_index(file)):
        return index.samples
    named = [each for table in tables for each in table.files()] or [file]
    if sum(map(os.path.getsize, named)) > SMALL:
        return None
    if tables:
        return sum(1 for table in tables for _ in table.rows())
    with open_buffered(file) as stream:
        scan = scan_stream(stream, file)
    if scan.problems.count:
        return None
    return len(scan.key) if isinstance(scan, RowScan) else len(scan.samples)
