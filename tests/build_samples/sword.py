"""Reading SWORD modules as Debian packages them: zLD dictionaries, and Bibles verse by verse without the markup."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

ENTRY = struct.Struct("<II")  # every index of a zLD module: two little-endian words
# Not the verse's words, and what follows the end of the book (a glossary, after the last verse).
ASIDE = re.compile(r"<(note|speaker|reference)\b[^>]*>.*?</\1>", re.DOTALL)
AFTER_BOOK = re.compile(r'<div [^>]*type="book"/>.*', re.DOTALL)
WITHIN_LINE = re.compile(r"</?(w|q|name|seg|rdg|catchWord)\b[^>]*>")
TAG = re.compile(r"<[^>]*>")


def read_dictionary(stem: Path) -> Iterator[tuple[str, str]]:
    """(key, entry as XML) of a zLD module, in its order; `stem` is the path of its four files without suffix.

    .idx: offset and size of a record in .dat; the record: key, CR LF, number of a block, number of the entry in it.
    .zdx: offset and size of a zlib block in .zdt; the block: count, (offset, size) of each entry, entries.
    """
    records, keys, places, blocks = (
        stem.with_suffix(suffix).read_bytes() for suffix in (".idx", ".dat", ".zdx", ".zdt")
    )

    @cache
    def block(number: int) -> bytes:
        start, size = ENTRY.unpack_from(places, number * ENTRY.size)
        return zlib.decompress(blocks[start : start + size])

    for start, size in ENTRY.iter_unpack(records):
        key, _, place = keys[start : start + size].partition(b"\r\n")
        number, entry = ENTRY.unpack_from(place)
        begin, length = ENTRY.unpack_from(block(number), 4 + entry * ENTRY.size)
        yield key.decode(), block(number)[begin : begin + length].rstrip(b"\0").decode()


def read_bible(root: Path, module: str, skipped_books: Sequence[str] = ()) -> dict[str, str]:
    """ "Gen.1.1" → plain text of every verse that has any; `root` is the folder that holds mods.d and modules."""
    from pysword.modules import SwordModules

    modules = SwordModules(str(root))
    modules.parse_modules()
    bible: Any = modules.get_bible_from_module(module)
    bible._decompressed_text = cache(bible._decompressed_text)  # it would inflate a whole book for each verse: 40 s
    verses: dict[str, str] = {}
    books = [book for testament in bible.get_structure().get_books().values() for book in testament]
    for book in books:
        for chapter in range(1, book.num_chapters + 1) if book.osis_name not in skipped_books else ():
            marked = bible.get_iter(book.osis_name, chapter, clean=False)
            verses |= {f"{book.osis_name}.{chapter}.{n}": plain(text) for n, text in enumerate(marked, 1)}
    return {verse: text for verse, text in verses.items() if text}


def plain(osis: str) -> str:
    """The words of a verse in OSIS markup. pysword's own cleaner joins the words on both sides of a footnote."""
    text = ASIDE.sub(" ", AFTER_BOOK.sub("", osis))
    text = unescape(TAG.sub(" ", WITHIN_LINE.sub("", text)))
    text = re.sub(r"\s+([.,;:?!”’)])", r"\1", text)
    text = re.sub(r"([.,;:?!]”?’?”?)(?=[^\W\d_]|[“‘])", r"\1 ", text)  # the module drops the space after a quotation
    return " ".join(text.split())
