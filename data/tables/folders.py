"""Find the tables that a path names: a file, a folder of images, a data set of Hugging Face, a URL."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from unicodedata import normalize

from dyad.data.base.errors import BadRow, ConfigError
from dyad.data.base.files import leads_inside
from dyad.data.shards.scan_tar import MAX_BYTES, unread_images
from dyad.data.shards.sources import LISTED_SCHEMES
from dyad.data.shards.storage import list_remote, scheme_of, shard_name
from dyad.data.shards.text_files import decoded
from dyad.data.tables.coco import split_of
from dyad.data.tables.image_table import (
    CAPTION_FIELDS,
    IMAGE_SUFFIXES,
    LABEL_FIELDS,
    TEXT_FILES,
    image_column,
    known_columns,
    read_limited,
)
from dyad.data.tables.readers import COLUMNAR, OPENERS, Table, TableRows, coco_files, is_coco, open_table

ALWAYS = (".csv", *COLUMNAR)  # suffixes that are always tables; files of other suffixes may be read by offset
ROWS = (".jsonl", ".json", ".tsv")  # suffixes of files of rows that are read by offset
METADATA = tuple(f"metadata{suffix}" for suffix in (".csv", ".jsonl", ".parquet"))  # in a Hugging Face imagefolder
JUDGED = ("queries.jsonl", "qrels", "collection.tsv")  # entries by which a BEIR or MS MARCO folder is recognised
SPLIT = re.compile(r"(.+?)-\d{5}-of-\d{5}(-\w+)?\.\w+")  # shards of one split, as `datasets` names them
SPLITS = ("train", "val", "valid", "validation", "dev", "test")  # names of files and folders that are splits
KEPT = re.compile(r"\.|cache-.*\.arrow")  # hidden files, and those that `datasets` writes for map, filter and shuffle


def tables_of(path: str, columns: Sequence[str]) -> list[Table]:
    """Return the tables that `path` names: an existing file or folder, or a URL. No row is converted.

    The list is empty for shards, and for .tsv, .jsonl and .json files that training reads by offset
    (data/shards/rows.py). Of such files these are tables: local files with triples of ids (.tsv), with COCO annotations
    (.json), or with images and their captions or labels (.tsv, .jsonl); and, if `columns` is not empty, every file that
    `path` names. In a folder they are tables only if `columns` is not empty, except metadata.jsonl. columns: the
    setting data.columns. Raises ConfigError for a missing file, for a folder or a data set of the hub with several
    splits, and for triples of ids without a file of questions; DataError for a table that cannot be read; OSError when
    storage fails.
    """
    if os.path.isdir(path):
        found = _files_of(path, columns)
        return [_image_folder(path)] if found == [path] else [open_table(file) for file in found]
    if split_of(path)[1]:
        return [open_table(path)]
    scheme = scheme_of(path)
    listed = scheme in LISTED_SCHEMES and not re.search(r"\?\w+=", path)  # there a "?" without "=" is one of a glob
    suffix = os.path.splitext(path if listed else shard_name(path))[1]
    if suffix in ALWAYS or (columns and suffix in OPENERS):
        is_glob = glob.has_magic(path) if listed else scheme and "*" in path
        return [open_table(file) for file in (list_remote(path) if is_glob else [path])]
    if scheme:
        names_files = not listed or suffix in (*OPENERS, ".tar")
        return [] if names_files else [open_table(file) for file in _remote_files(path, columns)]
    if suffix not in OPENERS or (suffix == ".json" and not is_coco(path)):
        return []
    table = open_table(path)
    triples = suffix == ".tsv" and "query_text" in table.columns
    captioned = known_columns([*CAPTION_FIELDS, *LABEL_FIELDS], table.columns)  # a question may name an image as well
    return [table] if triples or (captioned and image_column(table)) else []


def _files_of(folder: str, columns: Sequence[str]) -> list[str]:
    """Return the paths of the tables in a folder; the list [folder] if it is a folder of images.

    The list is empty if the folder has shards, files of rows that are read by offset, or neither tables nor images.
    Files of rows are tables if `columns` is not empty. Raises ConfigError for a folder with several splits, and for one
    whose only files of rows are COCO annotations, which are read by the name of a file.
    """
    names = sorted(os.listdir(folder))
    if any(name.endswith(".tar") or name in JUDGED for name in names):
        return []
    if "dataset_dict.json" in names:
        splits = [f"{folder}/{path.parent.name}" for path in sorted(Path(folder).glob("*/state.json"))]
        raise ConfigError(f"{folder} has several splits. Write one of {', '.join(splits)}")
    if metadata := [os.path.join(folder, name) for name in METADATA if name in names]:
        return metadata[:1]
    for inner in (folder, os.path.join(folder, "data")):
        beside = sorted(name for name in os.listdir(inner) if not KEPT.match(name)) if os.path.isdir(inner) else []
        if found := [os.path.join(inner, name) for name in beside if name.endswith(COLUMNAR)]:
            return _one_split(folder, found)
    if not any(map(_is_image, names)):
        if rows := _files_of_rows(folder, [os.path.join(folder, name) for name in names]):
            if {*rows} <= {*(coco := coco_files(folder))}:
                raise ConfigError(f"{folder} has annotations of COCO. Give the path of their file: {coco[0]}")
            return rows if columns else []
        if found := [os.path.join(folder, name) for name in names if name.endswith(".csv")]:
            return _one_split(folder, found)
    return [folder] if any(_is_image(path.name) or path.is_dir() for path in _walk(folder)) else []


def _remote_files(url: str, columns: Sequence[str]) -> list[str]:
    """Return the URLs of the tables in a remote folder: all Parquet files of a data set on the Hugging Face hub.

    If there are none and `columns` is not empty, they are the folder's own files of rows, unless it has shards. Errors
    as of `tables_of`.
    """
    hub = list_remote(f"{url.rstrip('/')}/**/*.parquet") if scheme_of(url) == "hf" else []
    if hub or not columns:
        return _one_split(url, hub)
    files = list_remote(url)
    return [] if any(file.endswith(".tar") for file in files) else _files_of_rows(url, files)


def _files_of_rows(source: str, files: list[str]) -> list[str]:
    """Return the files with a suffix of ROWS, without hidden ones. Arguments and errors as of `_one_split`."""
    rows = [file for file in files if file.endswith(ROWS) and not shard_name(file).startswith(".")]
    for suffix in ROWS:
        _one_split(source, [file for file in rows if file.endswith(suffix)])
    return rows


def _one_split(source: str, files: list[str]) -> list[str]:
    """Return `files` unchanged; raise ConfigError when their names are those of several splits. source: the folder or
    data set that has them, for the message."""
    splits = sorted({split for file in files if (split := _split(file))})
    if len(splits) > 1:
        raise ConfigError(f"{source} has several splits. Write one of {', '.join(map(repr, splits))}")
    return files


def _split(file: str) -> str | None:
    """Return a glob of the files of the split that a file belongs to: the split that its own name tells, else its
    folder's name. None if neither name tells a split."""
    folder, name = os.path.split(file)
    stem, suffix = os.path.splitext(name)
    if shard := SPLIT.fullmatch(name):
        return f"{folder}/{shard[1]}-*{suffix}"
    if stem in SPLITS:
        return file
    return f"{folder}/*{suffix}" if os.path.basename(folder) in SPLITS else None


def _is_image(name: str) -> bool:
    return _suffix(name) in IMAGE_SUFFIXES


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower().removeprefix(".")


# ---- a folder of images --------------------------------------------------------------------------------------------


def _image_folder(folder: str) -> Table:
    """Return a folder of images as a table with a row for each image in it and in all folders below, without hidden
    ones.

    Its columns are image (relative path), txt (text of the .txt file of the same name) and, if no image lies in
    `folder` itself, class (name of the folder that the image is in).
    """
    root = Path(folder)
    flat = any(path.parent == root for path in _files(root) if _is_image(path.name))
    columns = ["image", TEXT_FILES, *([] if flat else ["class"])]

    def files() -> Iterator[str]:  # the folder in place of a missing file, which cannot be measured
        yield from (str(path if path.exists() else path.parent) for path in _files(root))

    return Table(folder, columns, partial(_rows, root, columns), folder, files)


def unread_in(path: str) -> str:
    """Return a text for a message with the number of images in a folder and all folders below that are not read, by
    format; "" if there are none, and if `path` is no folder. Hidden files count; hidden folders are left out."""
    files = _walk(path) if os.path.isdir(path) else ()
    return unread_images(Counter(_suffix(file.name) for file in files if not _is_image(file.name)))


def _walk(folder: str | Path) -> Iterator[Path]:
    """Yield the files (hidden ones too) and the links to folders, in a folder and all folders below but hidden ones.
    Raises OSError for a folder that cannot be listed, because its files would otherwise be left out silently."""

    def refuse(error: OSError) -> None:
        raise error

    for inner, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(inner, name))]
        yield from (Path(inner, name) for name in (*names, *links))


def _files(folder: Path) -> list[Path]:
    """Return the sorted images, .txt files and links to folders in a folder and all folders below, without hidden ones.
    A link to a missing image is one of them, so that the image is not left out silently."""
    seen = (path for path in _walk(folder) if not path.name.startswith("."))
    return sorted(path for path in seen if _suffix(path.name) in (*IMAGE_SUFFIXES, "txt") or path.is_dir())


def _rows(folder: Path, columns: Sequence[str]) -> TableRows:
    """Yield a row (name, fields) for each image in the folder, with the text of the .txt file of the same stem.

    The files of images are not opened. columns: the fields of a row. `fields` is a BadRow (an error object) if the
    image or its text is a link out of the folder, or the text cannot be used. There is also a row with a BadRow for
    each link to a folder and, if any image of the folder has a text, for each .txt file without an image; otherwise
    texts are no captions and left out. Stems are compared in Unicode's NFC form, because some systems write é as one
    character, others as two.
    """
    files = _files(folder)
    texts = {_stem(file): file for file in files if _suffix(file.name) == "txt"}
    stems = {_stem(file) for file in files if _is_image(file.name)}
    captioned = not stems.isdisjoint(texts)
    for file in files:
        name = str(file.relative_to(folder))
        if file.is_dir():
            yield name, BadRow("link to a folder", f"{file} is not followed; copy what it leads to (cp -rL)")
        elif _is_image(file.name):
            try:
                refuse_link(file, folder)
                fields = {"image": name, TEXT_FILES: _text(texts.get(_stem(file)), folder), "class": file.parent.name}
                yield name, {column: fields[column] for column in columns}
            except BadRow as bad:
                yield name, bad
        elif _stem(file) not in stems and captioned:
            yield name, BadRow("no image beside the text")


def _stem(file: Path) -> str:
    return normalize("NFC", str(file.with_suffix("")))


def refuse_link(file: Path, folder: Path) -> None:
    """Raise BadRow if `file` leads out of the folder by a symbolic link; a missing file passes.

    Packed shards are shared with others, so no file from outside the folder may get into a shard. In a snapshot of the
    Hugging Face hub, links to its folder `blobs` pass.
    """
    if os.path.exists(file) and not leads_inside(file, folder):
        raise BadRow("link out of the folder", f"{file}; copy what it leads to (cp -L)")


def _text(file: Path | None, folder: Path) -> str | None:
    """Return the text of a .txt file; None if `file` is None. Raises BadRow for a file that cannot be read, is too big,
    not UTF-8, or a link out of the folder."""
    if file is None:
        return None
    refuse_link(file, folder)
    try:
        return decoded(read_limited(file, MAX_BYTES["txt"])).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise BadRow("caption is no text", f"{file} is not UTF-8 at byte {error.start}") from None
