"""`python -m data pack`: packs images and captions into shards, or converts questions and passages (convert.py).

The shards have webdataset's format and keep the bytes of the images. Tar shards may be the input too: their samples
that training refuses are put in order or left out.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from dyad.data.base.errors import BadFormat, BadRow, ConfigError, DataError, SampleError
from dyad.data.base.progress import print_line
from dyad.data.cli import outputs
from dyad.data.cli.contents import caption_name
from dyad.data.cli.convert import convert, convert_passages
from dyad.data.cli.inputs import InputKind, kind_of, require_images, tables_and_tars
from dyad.data.cli.options import ImageTask, PackOptions, ReadOptions, Target, table_keys
from dyad.data.cli.outputs import Tally
from dyad.data.cli.split import split_packed
from dyad.data.cli.tars import MakeSample, Members, tar_samples
from dyad.data.question_passage.fields import named
from dyad.data.question_passage.formats import known_formats
from dyad.data.shards.scan_tar import IMAGES, TEXTS
from dyad.data.tables.folders import unread_in
from dyad.data.tables.image_table import ImageTable, image_table
from dyad.data.tables.readers import Table


def run(arguments: Sequence[str], options: PackOptions) -> None:
    """Pack or convert the only input in `arguments`, depending on whether it holds images, questions or passages.

    Raises ConfigError for options.val with passages alone, and as `pack_pairs`, `convert` and `convert_passages` do.
    """
    packs = {InputKind.images: pack_pairs, InputKind.questions: convert, InputKind.passages: convert_passages}
    kind = kind_of(arguments, options)
    if options.val and kind is InputKind.passages:
        raise ConfigError(f"val={options.val:g}: INPUT {arguments[0]} has passages only, which are not split.")
    packs[kind](arguments[0], options)


def pack_pairs(source: str, options: PackOptions) -> None:
    """Write the images and captions of an input as shards into the new folder `options.out`, and index the shards.

    Prints how to train on them. With options.val they are split into train/ and val/. Raises ConfigError for options
    that cannot work, for a folder that exists and is not empty, and for a missing column. With on_error=stop a bad row
    raises DataError, naming the row, and the folder is not made: one whose image is missing or cannot be decoded, one
    that `ImageTable.members` or `tar_samples` refuses, and, until captions are found, one that `_captions_of` refuses.
    With on_error=skip such rows are left out and counted; DataError is raised if no row remains.

    The command that trains reads captions where the first sample with captions has them. It has task=views for shards
    without txt, json and cls members, and task=labelled for class numbers, else options.task.
    """
    out = outputs.checked_new_folder(options.out)
    if options.to is not Target.shards:
        require_images([source], options, "INPUT")
        raise ConfigError(f"to={options.to.name}: images and captions become shards; only questions are converted.")
    tally, name = Tally(options.on_error), ""
    with outputs.new_folder(out) as folder:
        with outputs.shard_writer(folder, options) as write:
            for where, make_sample in _samples(source, options):
                with tally.row(where):
                    sample = make_sample()
                    name = name or _captions_of(sample, options)
                    _refuse_undecodable(sample, options.max_image_pixels)
                    write({"__key__": f"{tally.rows - 1:09d}", **sample})
        tally.check_any(source)
        indexes = outputs.index_new(folder)
        samples, megabytes = sum(i.samples for i in indexes), sum(i.size for i in indexes) / 1e6
        paths, trained = {"data.train": outputs.file_names(indexes)}, samples
        if options.val:
            paths, trained = split_packed(folder, paths, options)
        shards = len([*folder.rglob("*.tar")])
    print(f"{samples:,} samples in {shards} shards ({megabytes:,.1f} MB) in {out}, indexed")
    if tally.skipped:
        print(tally)
    if unread := unread_in(source):
        print_line(f"not read: {unread}")
    read = ReadOptions(caption_per=options.caption_per, task=options.task)
    if not any(set(TEXTS) & set(index.suffixes) for index in indexes):
        read.task = ImageTask.views
    elif name == "cls":
        read.task = ImageTask.labelled
    train = outputs.image_command({key: out / path for key, path in paths.items()}, trained, read, name)
    print(f"train on them:\n  {train}")


def _captions_of(sample: Members, options: PackOptions) -> str:
    """Return where the captions of a sample are: the first entry of options.captions that it has, txt, cls or a json
    field.

    Returns "" if the sample has no txt, json and cls members, and if options.task uses no captions. Raises BadFormat
    if the sample has none of the entries, BadRow for a damaged json member.
    """
    from dyad.data.image_text.sample import ShardSample  # loads torch

    if options.task is not ImageTask.image_text or not set(TEXTS) & set(sample):
        return ""
    whole = ShardSample("", "", sample)
    try:
        return caption_name(whole, ReadOptions(captions=options.captions))
    except SampleError as error:
        why = str(error).removeprefix(whole.where)
        lacks = why.startswith(" has no caption")
        kind, advice = (BadFormat, ". Set captions=FIELD, or task=views or labelled") if lacks else (BadRow, "")
        raise kind("no caption", why.removeprefix(" has no caption").strip(": .") + advice) from None


def _samples(source: str, options: PackOptions) -> Iterator[tuple[str, MakeSample]]:
    """Yield (location, function) for each row of the tables of an input, then for each sample of its tars.

    The function returns the members of the sample or raises BadRow. Raises ConfigError for a table without images,
    before the first row.
    """
    tables, tars = tables_and_tars(source, options)
    for images in [image_input(table, options) for table in tables]:
        for where, fields in images.table.rows():
            yield f"{images.table.path}: {where}", partial(images.members, fields)
    yield from tar_samples(tars)


def _refuse_undecodable(sample: Members, max_pixels: int) -> None:
    """Raise BadRow if an image of the sample cannot be decoded. max_pixels: the most pixels of an image."""
    from dyad.data.image_text.decode import decode  # loads torch

    for suffix in IMAGES:
        try:
            _ = decode(sample[suffix], max_pixels) if suffix in sample else None
        except DataError as error:
            raise BadRow("undecodable image", str(error)) from None


def image_input(table: Table, options: PackOptions) -> ImageTable:
    """Return a table as an ImageTable, with its columns of images and captions found.

    Raises ConfigError for a table without a known column of images, and as `image_table` does.
    """
    if found := image_table(table, table_keys(options)):
        return found
    raise ConfigError(
        f"{table.path}: neither images nor a known format of texts in its columns {named(table.columns)}. Name them: "
        f"columns=[picture,caption] or columns=[question,positive,negative]. {known_formats()}"
    )
