"""`python -m data pack`: packs pictures and captions into shards, or converts questions and passages (convert.py).

The shards are those of webdataset; they keep the bytes of the pictures.
"""

from collections.abc import Sequence
from pathlib import Path

from dyad.data.base.errors import BadRow, ConfigError, DataError
from dyad.data.cli import outputs
from dyad.data.cli.convert import convert, convert_passages
from dyad.data.cli.inputs import InputKind, kind_of
from dyad.data.cli.options import PackOptions, Target
from dyad.data.cli.split import split_packed
from dyad.data.cli.tables import PairTable, TablePair, content, open_table
from dyad.data.image_text.pictures import read_header
from dyad.data.shards.scan_tar import MAX_BYTES, PICTURES


def run(arguments: Sequence[str], options: PackOptions) -> None:
    """Pack or convert the only input in `arguments`, depending on whether it holds pictures, questions or passages."""
    packs = {InputKind.pictures: pack_pairs, InputKind.questions: convert, InputKind.passages: convert_passages}
    kind = kind_of(arguments)
    if options.val and kind is InputKind.passages:
        raise ConfigError(f"val={options.val:g}: INPUT {arguments[0]} has passages only, which are not split.")
    packs[kind](arguments[0], options)


def pack_pairs(source: str, options: PackOptions) -> None:
    """Write the pictures and captions of an input as shards into the new folder `options.out`, index the shards, and
    print how to train on them.

    Raises ConfigError for a folder that exists and is not empty, or a missing column. With on_error=stop, a picture
    that is missing or has a broken header, or an empty caption, raises DataError naming the row, and the folder is not
    made.
    """
    out = outputs.checked_out(options)
    if options.to is not Target.shards:
        raise ConfigError(f"to={options.to.name}: pictures and captions become shards; only questions are converted.")
    table, tally = open_table(Path(source), options), outputs.Tally(options.on_error)
    with outputs.new_folder(out) as folder:
        with outputs.shard_writer(folder, options) as write:
            for where, fields in table.rows():
                with tally.row(f"{source}: {where}"):
                    members = _members(table.pair(fields), table, options)
                    write({"__key__": f"{tally.rows - 1:09d}", **members})
        tally.check_any(source)
        indexes = outputs.index_new(folder)
        paths, trained = {"data.train": outputs.shard_names(Path(), len(indexes))}, sum(i.samples for i in indexes)
        captions = table.caption_key if table.listed else "txt"
        if options.val:
            paths, trained = split_packed(folder, folder / paths["data.train"], options, captions=captions)
    samples, megabytes = sum(i.samples for i in indexes), sum(i.size for i in indexes) / 1e6
    print(f"{samples:,} samples in {len(indexes)} shards ({megabytes:,.1f} MB) in {out}, indexed")
    if tally.skipped:
        print(tally)
    train = outputs.picture_command({key: out / path for key, path in paths.items()}, trained, captions)
    print(f"train on them:\n  {train}")


def _members(pair: TablePair, table: PairTable, options: PackOptions) -> dict[str, bytes]:
    """Return the members of the sample that is made of one table row, as {suffix: bytes}: the picture; txt for a single
    caption; json for a list of captions and for the other fields of the row.

    Raises BadRow when the picture is missing or undecodable, or when a member is too long.
    """
    picture = content(pair.image, MAX_BYTES[PICTURES[0]])
    try:
        suffix = read_header(picture, options.max_image_pixels).suffix
    except DataError as error:
        raise BadRow("undecodable picture", f"{pair.image}: {error}") from None
    members = {suffix: picture}
    if not table.listed:
        members["txt"] = outputs.checked_size("txt", str(pair.caption).encode())
    if table.listed or table.extra:
        members["json"] = outputs.json_bytes({table.caption_key: pair.caption, **pair.extra})
    return members
