"""Convert the rows of a table of images and captions to samples of a tar shard."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unicodedata import normalize

from dyad.data.base.errors import BadRow, ConfigError, DataError, nearest, sound
from dyad.data.base.files import open_foreign
from dyad.data.base.progress import print_once
from dyad.data.config import CaptionPer, DataConfig
from dyad.data.image_text.captions import captions_in
from dyad.data.image_text.image_files import CONVERTED_SUFFIXES, read_header
from dyad.data.shards.scan_tar import IMAGES, MAX_BYTES
from dyad.data.shards.storage import scheme_of
from dyad.data.tables.readers import Fields, Row, Table, coco_files

PATHS = ("filepath", "image_path", "file_name", "image_name")  # columns that always hold paths of images
IMAGE_FIELDS = ("image", *PATHS, *IMAGES, "img", "picture", "filename", "path")
IMAGE_SUFFIXES = (*IMAGES, *CONVERTED_SUFFIXES)
CAPTION_FIELDS = ("caption", "captions", "title", "text", "texts", "txt", "sentences", "comment")
TEXT_FILES = "txt"  # the column with the text of .txt files, in folders and in tables that webdataset wrote
LABEL_FIELDS = ("class", "label", "fine_label", "name", *CAPTION_FIELDS)


@dataclass(frozen=True)
class TableOptions:
    """The user's options for reading tables. columns: names of the columns to use; empty: columns of known names.
    template: converts a label to a caption, as "a photo of a {}"; None: no conversion. max_pixels: images of more
    pixels are refused. prefix: begins the names of these options in messages, such as "data.". caption_per: what is one
    caption in a column txt and in .txt files, a line or a paragraph. captioned: whether images without captions are
    refused. relevance, teacher: columns that are kept beside `columns` in tables of texts; None: no such column."""

    columns: Sequence[str] = ()
    template: str | None = None
    max_pixels: int = DataConfig.max_image_pixels
    prefix: str = ""
    caption_per: CaptionPer = CaptionPer.paragraph
    captioned: bool = False
    relevance: str | None = None
    teacher: str | None = None

    def checked(self, table: Table) -> "TableOptions":
        """Return these options unchanged; raise ConfigError when the table lacks a column in self.columns."""
        for name in self.columns:
            if name not in table.columns:
                inner, cells = name.rpartition(".")[2], chain.from_iterable(row.items() for row in table.head())
                inside = next((each for each, cell in cells if isinstance(cell, Mapping) and inner in cell), None)
                hint = f" '{inner}' is inside of '{inside}': make it a column." if inside else ""
                raise ConfigError(
                    f"{table.path}: no column '{name}'.{nearest(name, table.columns)}{hint} Its columns are "
                    f"{', '.join(table.columns)}: set {self.prefix}columns=[…]"
                )
        return self

    def as_args(self) -> list[str]:
        """Return these options as arguments of `python -m data`, such as "template=a photo of a {}". Options at their
        default are left out, and max_pixels, prefix and captioned always."""
        columns = [f"columns=[{','.join(self.columns)}]"] if self.columns else []
        per = [] if self.caption_per is CaptionPer.paragraph else [f"caption_per={self.caption_per.value}"]
        fields = {"relevance": self.relevance, "teacher": self.teacher}
        told = [f"{name}={field}" for name, field in fields.items() if field is not None]
        return [*columns, *([] if self.template is None else [f"template={self.template}"]), *per, *told]


def known_columns(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return those of `columns` that are in `names`, in the order of `names`. Case, and blanks around a column's name,
    do not count: "Caption", and " comment" of Flickr30k."""
    return [column for name in names for column in columns if column.strip().lower() == name]


def image_column(table: Table, columns: Sequence[str] = ()) -> str | None:
    """Return the name of the column that has the images of a table, as bytes, as {bytes, path} or as paths.

    None for a table without images. The values of the first rows decide, and if no row can be read, the name; a column
    named in PATHS always holds images. columns: the columns that the user named, of which only the first may have the
    images.
    """
    named = list(columns[:1]) or known_columns(IMAGE_FIELDS, table.columns)

    def has_images(name: str) -> bool:
        values = [row.get(name) for row in table.head()]
        return not values or any(_is_image(value, table.folder) for value in values)

    return next((name for name in named if known_columns(PATHS, [name]) or has_images(name)), None)


def _is_image(value: Any, folder: str | None) -> bool:
    if isinstance(value, str):
        with suppress(OSError, ValueError):  # no file has such a name
            known = os.path.splitext(value)[1].lower().removeprefix(".") in IMAGE_SUFFIXES
            return known or (folder is not None and (Path(folder) / value).is_file())
        return False
    return isinstance(value, bytes) or (isinstance(value, Mapping) and bool({"bytes", "path"} & set(value)))


@dataclass(frozen=True)
class ImageTable:
    """A table of images, usually with captions. image, caption: names of its columns of images and of captions, or of
    labels that options.template turns into captions; caption is None for a table without such a column. folder: the
    folder to which paths of images are relative; None: paths are not followed."""

    table: Table
    image: str
    caption: str | None
    options: TableOptions
    folder: str | None

    def members(self, fields: Row) -> dict[str, bytes]:
        """Convert a row to a sample: return its members (files) as {suffix: bytes}.

        They are the image, as PNG if training does not read its format; a txt with the captions, if any, with blank
        lines between them; and a json with the other columns, if the table has any, without fields that are bytes or a
        mapping or list with bytes at any depth. With options.template the caption column is in the json too. Raises
        `fields` if it is a BadRow. Raises BadRow for an image that `as_png` or `read_header` refuses, for a member that
        is too long, and as `encoded`, `captions` and `json_bytes` do.
        """
        from dyad.data.image_text.decode import as_png  # which imports torch

        fields = sound(fields)
        encoded, name = self.encoded(fields)
        try:
            encoded = as_png(encoded, self.options.max_pixels)
            suffix = read_header(encoded, self.options.max_pixels).suffix
        except DataError as error:
            raise BadRow("undecodable image", f"{name}: {error}") from None
        members = {suffix: checked_size(suffix, encoded)}
        if captions := self.captions(fields):
            members["txt"] = checked_size("txt", "\n\n".join(captions).encode())
        used = {self.image, self.caption} if self.options.template is None else {self.image}  # a label stays a field
        if not {*self.table.columns} <= used:
            others = [each for each in fields if each not in used]
            members["json"] = json_bytes({each: fields[each] for each in others if not _has_bytes(fields[each])})
        return members

    def encoded(self, fields: Fields) -> tuple[bytes, str]:
        """Return the bytes of the image file of a row, not decoded or checked, and its name for messages. Raises BadRow
        when the row has no image, the image is too big or its file cannot be read, or its path is a URL."""
        value = fields.get(self.image)
        if isinstance(value, str) and scheme_of(value):
            raise BadRow("image URL", f"{value:.80} is not downloaded; img2dataset makes shards of such a table")
        if path := self.path(fields):
            return read_limited(Path(path), MAX_BYTES[IMAGES[0]]), path
        data = value.get("bytes") if isinstance(value, Mapping) else value
        if not isinstance(data, bytes) or not data:
            raise BadRow("no image path", f"{self.image} = {value!r:.80}" if value else "")
        return checked_size(IMAGES[0], data), self.image

    def path(self, fields: Fields) -> str | None:
        """Return the path of the image of a row; None when the row holds the image itself or nothing.

        None also for a table from a URL, whose paths could name any file of this machine. If no file has the name,
        Unicode's composed (NFC) and decomposed (NFD) forms of the name are tried too; the file may be missing.
        """
        value = fields.get(self.image)
        if isinstance(value, Mapping):
            value = None if value.get("bytes") else value.get("path")
        if not isinstance(value, str) or not value or self.folder is None:
            return None
        path = os.path.join(self.folder, value)
        if value.isascii() or os.path.exists(path):
            return path
        others = (os.path.join(self.folder, normalize(form, value)) for form in ("NFC", "NFD"))
        return next(filter(os.path.exists, others), path)

    def captions(self, fields: Fields) -> list[str]:
        """Return the captions of a row from its caption column, which holds a text or a list of texts. The list is
        empty for a row without captions, and if one of its captions is blank.

        Each run of white space becomes one blank. A text in the column txt is instead split into captions, which may
        have several lines. With options.template each text is a label, which is put into the template with blanks in
        place of "_". Raises BadRow for a caption that is no text or no valid Unicode, for none with options.captioned,
        and for a blank one with options.captioned or options.template.
        """
        value = None if self.caption is None else fields.get(self.caption)
        texts = value if isinstance(value, list) else [value]
        if value is None or not texts:
            if self.options.captioned:
                raise BadRow("no caption")
            return []
        if not all(isinstance(text, str) for text in texts):
            raise BadRow("caption is no text", f"{value!r:.80}")
        lines = [" ".join(str(text).split()) for text in texts]
        if self.caption == TEXT_FILES and isinstance(value, str):
            lines = captions_in(value, self.options.caption_per)
        template = self.options.template
        if not lines or not all(lines):
            if self.options.captioned or template is not None:
                raise BadRow("empty caption")
            return []
        if template is not None:
            lines = [template.replace("{}", line.replace("_", " ")) for line in lines]
        try:
            "".join(lines).encode()
        except UnicodeEncodeError:
            raise BadRow("caption is no Unicode text", f"{value!r:.80}") from None
        return lines


def image_table(table: Table, options: TableOptions) -> ImageTable | None:
    """Return `table` as an ImageTable, with the columns of images and captions found; None for a table without images.

    Raises ConfigError for a column in options.columns that the table lacks; for a table of images also if there are
    more than two columns in options.columns or, with options.captioned, if it has no column of captions. In folders
    and in tables with a column of labels, this column must have a caption in the first rows.
    """
    named = options.checked(table).columns
    image = image_column(table, named)
    if image is None:
        return None
    key = f"{options.prefix}columns"
    if len(named) > 2:
        raise ConfigError(f"{key}=[{','.join(named)}]: '{image}' has images. Name it and one caption")
    known = CAPTION_FIELDS if options.template is None else LABEL_FIELDS
    caption = next(iter(named[1:] or known_columns(known, table.columns)), None)
    label = next(iter(known_columns(LABEL_FIELDS[:4], table.columns)), None)
    is_folder = os.path.isdir(table.path)
    empty = caption is None or ((label or is_folder) and not any(row.get(caption) for row in table.head()))
    if options.captioned and empty:
        where = "a .txt of the same name" if is_folder else ", ".join(known) if caption is None else caption
        coco = coco_files(table.path)[:1] if is_folder else []
        hints = [f"the path of the data to {file} (COCO)" for file in coco]
        hints += [] if is_folder else [f"{key}=[{image},…]"]
        hints += [f"{options.prefix}template='a photo of a {{}}' for captions of '{label}'"] if label else []
        hints += ["task=labelled for classes"] if label else ["task=views for images alone"]
        raise ConfigError(
            f"{table.path}: images in '{image}', no captions in {where}. "
            f"Its columns are {', '.join(table.columns)}: set {', or '.join(hints)}"
        )
    return ImageTable(table, image, caption, options, _folder_of_images(table, image))


def _folder_of_images(table: Table, column: str) -> str | None:
    """Return the folder to which the paths of images in `column` are relative: that of the table.

    If it has none of the first images, and just one folder inside it has any, such as Images, it is this one, and a
    line is printed. None for a table from a URL, whose paths could name any file of this machine.
    """
    if table.folder is None or os.path.isdir(table.path):
        return table.folder
    names = [name for row in table.head() if isinstance(name := row.get(column), str) and name]

    def has_any(folder: str | Path) -> bool:
        return any(os.path.isfile(os.path.join(folder, name)) for name in names)

    if not names or has_any(table.folder):
        return table.folder
    inside = [each for each in Path(table.folder or ".").iterdir() if each.is_dir() and has_any(each)]
    if len(inside) != 1:
        return table.folder
    print_once(f"{table.path}: its images are in {inside[0]}")
    return str(inside[0])


# ---- members of samples ----------------------------------------------------------------------------------------------


def _has_bytes(value: Any) -> bool:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, bytes) or any(map(_has_bytes, parts))


def read_limited(path: Path, limit: int) -> bytes:
    """Read a file of at most `limit` bytes and return them. Raises BadRow when it is missing, larger, no regular file
    or cannot be read."""
    try:
        with open_foreign(path) as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise BadRow("missing file", str(path)) from None
    except (OSError, ValueError) as error:
        raise BadRow("unreadable file", f"{path} ({error})") from None
    if len(data) > limit:
        raise BadRow("file too big", f"{path}: more than {limit} bytes")
    return data


def json_bytes(fields: Mapping[str, Any]) -> bytes:
    """Encode the fields of a row as JSON in UTF-8. Numbers that JSON cannot hold (NaN, infinity) become null; values of
    types that it lacks, such as dates, become texts by str(). Raises BadRow for a text that is no valid Unicode, and
    when the result has more bytes than readers of shards accept."""
    dumps = partial(json.dumps, ensure_ascii=False, default=str)
    try:
        text = dumps(fields)
        if "NaN" in text or "Infinity" in text:  # perhaps inside a text, which stays
            text = dumps(json.loads(text, parse_constant=lambda name: None))
        return checked_size("json", text.encode())
    except ValueError as error:
        raise BadRow("a field JSON cannot hold", str(error)) from None


def checked_size(suffix: str, content: bytes) -> bytes:
    """Return `content`, the bytes of a member of a sample. Raises BadRow when there are more of them than MAX_BYTES
    allows for the member's suffix."""
    if len(content) > MAX_BYTES[suffix]:
        raise BadRow(f"{suffix} too long", f"more than {MAX_BYTES[suffix]} bytes")
    return content
