"""`python -m data VERB`: index, check and make shards. Every verb imports what it needs when it runs."""

from __future__ import annotations

import sys
from pathlib import Path

from data.command_line import Verb, dispatch
from data.errors import run
from data.options import BuildOptions, CheckOptions, IndexOptions, PackOptions

PURPOSE = """Shards for training: list what is in them and what is broken, check them, make them.
A SOURCE is a .tar (webdataset) or .jsonl file, their folder, a glob, 'd/{000..099}.tar', 'a.tar::b.tar' or a URL."""
CLOSING = "Quote braces and globs. Exit codes: 0 ok, 2 a command that cannot work, 3 damaged data."


def index(arguments: list[str], options: IndexOptions) -> None:
    from data.listing import list_shards
    from data.sources import parse_sources

    list_shards(parse_sources(arguments, "SOURCE"), options)


def check(arguments: list[str], options: CheckOptions) -> None:
    from data.check import check_shards
    from data.sources import parse_sources

    check_shards(parse_sources(arguments, "SOURCE"), options)


def pack(arguments: list[str], options: PackOptions) -> None:
    from data.pack import pack_pairs

    pack_pairs(arguments[0], options)


def build(arguments: list[str], options: BuildOptions) -> None:
    from data import build as builder

    builder.build(arguments[0], Path(options.out) if options.out else None, options.check)


VERBS = (
    Verb(
        "index",
        "SOURCE",
        "scan shards once; list samples and every problem",
        ("index shards/", "index 'shards/{000..099}.tar' out=manifest.json", "index s3://bucket/shards/ workers=8"),
        IndexOptions,
        index,
        several=True,
    ),
    Verb(
        "check",
        "SOURCE",
        "verify checksums, decode every picture, summarise",
        ("check shards/", "check shards/ captions=caption workers=4", "check 'train/*.tar::val/*.tar'"),
        CheckOptions,
        check,
        several=True,
    ),
    Verb(
        "pack",
        "INPUT",
        "turn pictures and captions into shards",
        (
            "pack pairs.csv out=shards",
            "pack pairs.csv out=shards csv_separator=, csv_image_key=path csv_caption_key=text",
            "pack pictures/ out=shards on_error=skip",
            "pack pairs.parquet out=shards image_key=image caption_key=captions",
            "pack pairs.jsonl out=shards maxcount=5000 maxsize=5e8",
        ),
        PackOptions,
        pack,
    ),
    Verb(
        "build",
        "NAME",
        "make a data set of data/samples again",
        ("build emoji", "build emoji out=/tmp/emoji", "build emoji check=true"),
        BuildOptions,
        build,
    ),
)


def main() -> None:
    dispatch("data", PURPOSE, VERBS, sys.argv[1:], CLOSING)


if __name__ == "__main__":
    run(main)
