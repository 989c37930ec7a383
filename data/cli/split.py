"""`python -m data split`: divides a source into training and validation data that have no content in common.

Rows that share a content (such as a caption) are in one group, and so are rows that are connected by a chain of such
rows. In the order of a hash of their contents, each group that still fits into the share is taken for validation. So
the division depends only on the data and the options.
"""

import shlex
import shutil
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dyad.data.base.errors import ConfigError, DataError, nearest
from dyad.data.cli import outputs
from dyad.data.cli.contents import contents, train_command
from dyad.data.cli.inputs import is_beir, shards_of
from dyad.data.cli.options import PackOptions, SplitOptions, Target, table_keys
from dyad.data.cli.writers import CORPORA, ROW_FILES
from dyad.data.question_passage import fields as row_fields, formats
from dyad.data.question_passage.corpus import corpus_of
from dyad.data.question_passage.judgements import judgements, qrels_file, queries_of
from dyad.data.shards.content_keys import Int64s, content_key
from dyad.data.shards.rows import SUFFIXES, Rows, open_rows
from dyad.data.shards.sources import local_path
from dyad.data.shards.storage import shard_name

SIDES = ("train", "val")
JUDGED = {"train": "train", "val": "test"}  # part → split name of its judgements in BEIR; data.val reads test
KEPT = ("split", "by", "maxcount", "maxsize", "task", "captions")  # options that pack and split share
Parts = tuple[dict[str, Path], int]  # paths of data.train and data.val, and the number of training rows


def run(arguments: Sequence[str], options: SplitOptions) -> None:
    """Split the source that the arguments (paths or URLs) name into options.out/train and options.out/val.

    Prints how to train on them. Raises ConfigError for options that cannot work, DataError for damaged data.
    """
    out = outputs.checked_new_folder(options.out)
    with outputs.new_folder(out) as folder:
        paths, samples = split(arguments, folder, options)
    how = train_command(arguments, options, {key: out / path for key, path in paths.items()}, samples)
    print(f"train on them:\n  {how}")


def split_packed(folder: Path, paths: Mapping[str, Path], packed: PackOptions) -> Parts:
    """Split the file or shards of data.train that `python -m data pack` has written into `folder`.

    Afterwards `folder` has only the new folders train and val, and the corpus if pack has written one; in the format
    beir both folders have their own. paths: the path of data.train and, if training needs a corpus, of
    data.passage.corpus, relative to `folder`. packed: the options of pack, with `val`. Return `paths` with the new
    data.train and data.val, and the number of training rows. Errors as of `run`.
    """
    corpus = str(folder / paths["data.passage.corpus"]) if "data.passage.corpus" in paths else None
    kept = {key: getattr(packed, key) for key in (*KEPT, "val", "caption_per")}
    parts, samples = split([str(folder / paths["data.train"])], folder, SplitOptions(corpus=corpus, **kept))
    whole = "" if packed.to is Target.beir else CORPORA.get(packed.to, ("",))[0]
    for entry in folder.iterdir():
        if entry.name not in (*SIDES, whole):
            entry.unlink() if entry.is_file() else shutil.rmtree(entry)
    return {**paths, **parts}, samples


def split(values: Sequence[str], folder: Path, options: SplitOptions) -> Parts:
    """Write the rows of a source into folder/train and folder/val, and print how many rows each part has.

    Also printed is how many contents both parts have in common. Return the paths of data.train and data.val, relative
    to `folder`, and the number of training rows. Raises ConfigError for options that cannot work, such as a share into
    which no group of rows fits; DataError for damaged data and for a source without rows.
    """
    beir, by, named = is_beir(values[0]), options.by, set[str]()
    rows = open_rows(_files(values, options))
    place = {rows.where(i): i for i in range(len(rows))} if beir else {}  # not every question has judgements
    places, found = array("q"), defaultdict[str, "array[int]"](lambda: array("q"))
    for number, (where, held) in enumerate(contents(values, options, "SOURCE")):
        places.append(place[where] if beir else number)
        if by not in ("content", *held):
            try:
                named |= (fields := rows.fields(places[-1])).keys()
            except DataError as error:
                raise ConfigError(f"by={by} is none of content, {', '.join(held)}, and no field: {error}") from None
            held[by] = {content_key(repr(fields.get(by)).encode()): ""}
        for kind, keys in held.items():
            for key in keys:
                found[kind].extend((number, key))
    pairs = {kind: np.reshape(np.array(flat, np.int64), (-1, 2)).T for kind, flat in found.items()}
    joining = [columns for kind, columns in pairs.items() if by in ("content", kind)]
    if not joining and places:
        raise ConfigError(f"by={by}: no row has a {by}. Set by= to content, {', '.join(pairs)} or a field")
    if not joining:
        raise DataError(f"{values[0]}: there is no row to split.")
    if named and by not in named:
        hint = nearest(by, {"content", *pairs, *named} - {by})
        raise ConfigError(f"by={by}: no row has this field.{hint} Rows have {row_fields.named(sorted(named))}")
    in_val, paths = validation_rows(np.concatenate(joining, axis=1), len(places), options), dict[str, Path]()
    for side in SIDES:
        chosen, part = np.array(places)[in_val == (side == "val")].tolist(), folder / side
        part.mkdir()
        if beir:
            _copy_beir(Path(local_path(values[0])), rows, chosen, part, options)
        else:
            _copy_rows(rows, chosen, part, replace(options, split=side))
        files = outputs.index_new(part)
        paths[f"data.{side}"] = Path(side) / ("" if beir else outputs.file_names(files))
        print(f"{side:<6}{len(chosen):,} of {len(places):,} rows ({len(chosen) / len(places):.1%})")
    for kind, (row, key) in pairs.items():
        shared = len(np.intersect1d(key[in_val[row]], key[~in_val[row]]))
        print(f"in both parts: {shared:,} {kind}{'s' * (shared != 1)}")
    return paths, int((~in_val).sum())


def validation_rows(pairs: Int64s, rows: int, options: SplitOptions) -> np.ndarray:
    """Return which rows are for validation, bool (rows,). pairs (2, k) int64: k pairs of a row index and the content
    key of something in the row. rows: number of rows.

    Rows that share a content key, or are connected by a chain of such rows, are one group; so are all rows without a
    key. In the order of a hash, each group is added if validation then has at most round(options.val · rows) rows, and
    training at least one. Raises ConfigError when no group fits.
    """
    row, (keys, item) = pairs[0], np.unique(pairs[1], return_inverse=True)
    nodes = rows + len(keys)  # of a graph: the rows, then the keys
    links = coo_array((np.ones(len(row), bool), (row, rows + item)), shape=(nodes, nodes))
    count, component = connected_components(links, directed=False)
    least = np.full(count, np.iinfo(np.int64).max)  # the least key of each component, which names a group
    np.minimum.at(least, component[rows:], keys)
    group = least[component[:rows]]
    groups, sizes = np.unique(group, return_counts=True)
    left, taken = min(round(options.val * rows), rows - 1), []
    for i in sorted(range(len(groups)), key=lambda i: content_key(str(groups[i]).encode())):
        if sizes[i] <= left:
            taken.append(groups[i])
            left -= sizes[i]
    if not taken:
        raise ConfigError(
            f"val={options.val:g} of {rows:,} rows: what is equal stays together, in {len(groups):,} groups of "
            f"{sizes.min():,} to {sizes.max():,} rows. Set val= so that one fits, or by=, one of "
            "picture, caption, question, passage or a field"
        )
    return np.isin(group, taken)


def _files(values: Sequence[str], options: SplitOptions) -> list[str]:
    """Return the paths of the files with the rows of a source; for a BEIR folder, the path of its queries.jsonl.

    Raises ConfigError for files of several kinds, for files that split does not take, for an MS MARCO folder, and for a
    BEIR folder with the option corpus, or without the judgements of options.split.
    """
    if is_beir(values[0]):
        if options.corpus or Path(corpus_of(folder := local_path(values[0])) or "").suffix == ".tsv":
            raise ConfigError(
                f"SOURCE {values[0]}: split takes a BEIR folder with its own corpus.jsonl, without corpus=. Others are "
                f"split as they are packed: {_pack_command(values, options, 'to=beir')}"
            )
        return [queries_of(qrels_file(folder, options.split, "split"))]  # spelled as `contents` has it
    files = [file for source in shards_of(values, options, "SOURCE", SUFFIXES) for file in source.shards]
    if len(suffixes := {Path(shard_name(file)).suffix for file in files}) > 1 or not suffixes <= ROW_FILES.keys():
        raise ConfigError(
            f"SOURCE has {', '.join(sorted(suffixes))} files: split takes files of one kind, {', '.join(ROW_FILES)}, "
            f"or a BEIR folder. Others are split as they are packed: {_pack_command(values, options)}"
        )
    return files


def _pack_command(values: Sequence[str], options: SplitOptions, *others: str) -> str:
    """Return the command `python -m data pack` that packs a source and splits it with the same options.

    others: further arguments.
    """
    keys = (key for key in ("corpus", *KEPT) if getattr(options, key) != getattr(SplitOptions, key))
    words = [*others, *(f"{key}={getattr(options, key)}" for key in keys), *table_keys(options).as_args()]
    whole = ("::".join(values), f"out={options.out}", f"val={options.val:g}", *words)
    return shlex.join(["python", "-m", "data", "pack", *whole])


def _copy_rows(rows: Rows, chosen: Sequence[int], part: Path, options: SplitOptions) -> None:
    """Write the rows with indices `chosen`, with unchanged bytes, to new files in the folder `part`.

    Samples of shards keep their keys; if two samples share a key, all get numbers as keys.
    """
    shards, suffix = rows.shards, Path(rows.shards.indexes[0].name).suffix
    unique = len({shards.key(i) for i in range(len(shards))}) == len(shards)
    with ROW_FILES[suffix](part, options) as write:
        for i in chosen:
            write({"__key__": shards.key(i) if unique else f"{i:09d}", **shards.read(i)})


def _copy_beir(source: Path, queries: Rows, chosen: Sequence[int], part: Path, options: SplitOptions) -> None:
    """Write a BEIR folder `part` with the questions of indices `chosen`, their judgements, and the whole corpus.

    The judgements are all those of these questions in the split options.split, whatever their grade, written as the
    split that JUDGED names. source: the BEIR folder; queries: its questions. `part` must exist, empty.
    """
    shutil.copyfile(source / "corpus.jsonl", part / "corpus.jsonl")
    (part / "queries.jsonl").write_bytes(b"".join(queries.shards.read(i)["json"] + b"\n" for i in chosen))
    (part / "qrels").mkdir()
    ids = {formats.passage_of(queries.fields(i)).id for i in chosen}
    judged = judgements(str(source / "qrels" / f"{options.split}.tsv"))
    kept = [f"{question}\t{passage}\t{grade}\n" for _, (question, passage), grade in judged if question in ids]
    (part / "qrels" / f"{JUDGED[part.name]}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(kept))
