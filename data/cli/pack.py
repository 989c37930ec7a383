"""`python -m data pack` for pictures and captions: webdataset shards with the bytes of the pictures, reproducibly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dyad.data.base.errors import BadRow, ConfigError, DataError
from dyad.data.cli.options import PackOptions, Target
from dyad.data.cli.outputs import (
    Tally,
    checked_out,
    command,
    index_new,
    new_folder,
    shard_names,
    shard_writer,
)
from dyad.data.image_text.pictures import read_header
from dyad.data.shards.index import ShardIndex
from dyad.data.shards.scan_tar import MAX_BYTES, PICTURES
from dyad.data.shards.tables import PairTable, TablePair, content, open_table


def pack_pairs(source: str, options: PackOptions) -> None:
    """Write the shards of an input into the new folder `options.out`, index them, print how to train on them.

    Raises ConfigError for a folder that exists or a column that does not, DataError naming the row for a missing or
    undecodable picture or an empty caption (`on_error=stop`). Then the folder is not made.
    """
    out = checked_out(options)
    if options.to is not Target.shards:
        raise ConfigError(f"to={options.to.name}: pictures and captions become shards; only questions are converted.")
    table = open_table(Path(source), options)
    with new_folder(out) as folder:
        tally = _write(source, table, folder, options)
        indexes = index_new(folder.glob("*.tar"))
    print(_summary(out, indexes, table, tally))


def _write(source: str, table: PairTable, folder: Path, options: PackOptions) -> Tally:
    tally = Tally(options.on_error)
    with shard_writer(folder, options) as write:
        for where, fields in table.rows():
            with tally.row(f"{source}: {where}"):
                members = _members(table.pair(fields), table, options)
                write({"__key__": f"{tally.rows - 1:09d}", **members})
    tally.check_any(source)
    return tally


def _members(pair: TablePair, table: PairTable, options: PackOptions) -> dict[str, bytes]:
    """The members of a sample by suffix: the picture, txt for one caption, json for several and for other fields."""
    suffix, picture = _picture(pair.image, options.max_image_pixels)
    members = {suffix: picture}
    if not table.listed:
        members["txt"] = str(pair.caption).encode()
    if table.listed or table.extra:
        members["json"] = _json({table.caption_key: pair.caption, **pair.extra})
    for kind in ("txt", "json"):
        if len(members.get(kind, b"")) > MAX_BYTES[kind]:
            raise BadRow(f"{kind} too long", f"more than {MAX_BYTES[kind]} bytes")
    return members


def _json(value: dict) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str).encode()
    except ValueError as error:
        raise BadRow("a field JSON cannot hold", str(error)) from None


def _picture(path: Path, max_pixels: int) -> tuple[str, bytes]:
    data = content(path, MAX_BYTES[PICTURES[0]])
    try:
        return read_header(data, max_pixels).suffix, data
    except DataError as error:
        raise BadRow("undecodable picture", f"{path}: {error}") from None


def _summary(out: Path, indexes: Sequence[ShardIndex], table: PairTable, tally: Tally) -> str:
    samples, megabytes = sum(i.samples for i in indexes), sum(i.size for i in indexes) / 1e6
    lines = [f"{samples:,} samples in {len(indexes)} shards ({megabytes:,.1f} MB) in {out}, indexed"]
    if tally.skipped:
        lines.append(str(tally))
    captions = [f"data.captions=[{table.caption_key}]"] if table.listed else []
    how = ["model.name=ViT-B-32", "epochs=10", f"global_batch_size={min(samples, 256)}"]
    train = command("python -m train", {"data.train": shard_names(out, len(indexes))}, *captions, *how)
    return "\n".join([*lines, "train on them:", f"  {train}"])
