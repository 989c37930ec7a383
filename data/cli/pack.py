"""`python -m data pack`: packs pictures and captions into shards, or converts questions and passages (convert.py).

The shards are those of webdataset; they keep the bytes of the pictures.
"""

from collections.abc import Sequence

from dyad.data.base.errors import ConfigError
from dyad.data.cli import outputs
from dyad.data.cli.convert import convert, convert_passages
from dyad.data.cli.inputs import InputKind, first_row, input_tables, kind_of
from dyad.data.cli.options import PackOptions, Target, table_keys
from dyad.data.cli.outputs import Tally
from dyad.data.cli.split import split_packed
from dyad.data.question_passage.formats import unknown_format
from dyad.data.tables.pictures import PictureTable, picture_table
from dyad.data.tables.readers import Table


def run(arguments: Sequence[str], options: PackOptions) -> None:
    """Pack or convert the only input in `arguments`, depending on whether it holds pictures, questions or passages."""
    packs = {InputKind.pictures: pack_pairs, InputKind.questions: convert, InputKind.passages: convert_passages}
    kind = kind_of(arguments, options)
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
    tables, tally = [picture_input(table, options) for table in input_tables(source, options)], Tally(options.on_error)
    with outputs.new_folder(out) as folder:
        with outputs.shard_writer(folder, options) as write:
            for pictures in tables:
                for where, fields in pictures.table.rows():
                    with tally.row(f"{pictures.table.path}: {where}"):
                        write({"__key__": f"{tally.rows - 1:09d}", **pictures.members(fields)})
        tally.check_any(source)
        indexes = outputs.index_new(folder)
        samples, megabytes = sum(i.samples for i in indexes), sum(i.size for i in indexes) / 1e6
        paths, trained = {"data.train": outputs.file_names(indexes)}, samples
        if options.val:
            paths, trained = split_packed(folder, paths, options)
    print(f"{samples:,} samples in {len(indexes)} shards ({megabytes:,.1f} MB) in {out}, indexed")
    if tally.skipped:
        print(tally)
    train = outputs.picture_command({key: out / path for key, path in paths.items()}, trained)
    print(f"train on them:\n  {train}")


def picture_input(table: Table, options: PackOptions) -> PictureTable:
    """Find the pictures and captions of a table. Raises ConfigError for a table of unknown columns."""
    if found := picture_table(table, table_keys(options)):
        return found
    raise ConfigError(
        f"{table.path}: no pictures in {', '.join(table.columns)}; of texts {unknown_format(first_row(table))}."
        " Name the columns: columns=[picture,caption] or columns=[question,positive,negative]"
    )
