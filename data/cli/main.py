"""`python -m data VERB`: index, check, pack and convert data. Each verb imports its modules when it runs."""

from __future__ import annotations

import sys

from dyad.data.base.command_line import Verb, dispatch
from dyad.data.base.errors import ConfigError
from dyad.data.cli.options import CheckOptions, IndexOptions, PackOptions

PURPOSE = """Data for both tasks: list what is in it and what is broken, check it, pack and convert it.
  pictures and captions    shards: .tar files (webdataset), packed from CSV, Parquet, JSON-lines or a folder
  questions and passages   DPR .json or .jsonl, Tevatron .jsonl (passages inside, or by id from a corpus), FlagEmbedding
                           .jsonl, a BEIR folder, shards of these; passages alone: .jsonl, or .tsv with id, text, title
A SOURCE is a file, its folder, a glob, 'd/{000..099}.tar', several joined as 'a.tar::b.tar', or a URL.
Compressed files cannot be read by offset: unpack them first, with gunzip -k FILE.gz or zstd -d FILE.zst."""
CLOSING = "Quote braces and globs. Exit codes: 0 ok, 2 a command that cannot work, 3 damaged data."


def index(arguments: list[str], options: IndexOptions) -> None:
    from dyad.data.cli.index import list_shards
    from dyad.data.shards.rows import SUFFIXES
    from dyad.data.shards.sources import SUFFIXES as SHARDS
    from dyad.data.shards.sources import parse_sources

    # a folder of shards may have a manifest.json: .json and .tsv files count only where they are named
    rows = any(argument.endswith((".json", ".tsv")) for argument in arguments)
    list_shards(parse_sources(arguments, "SOURCE", SUFFIXES if rows else SHARDS), options)


def check(arguments: list[str], options: CheckOptions) -> None:
    from dyad.data.cli.check import check_passages, check_questions, check_shards
    from dyad.data.cli.inputs import InputKind, kind_of, refuse_unknown

    kind = kind_of(arguments)
    if kind is InputKind.questions:
        check_questions(arguments, options)
    elif kind is InputKind.passages:
        check_passages(arguments, options)
    else:
        refuse_unknown(arguments)
        check_shards(arguments, options)


def pack(arguments: list[str], options: PackOptions) -> None:
    from dyad.data.cli.convert import convert, convert_passages
    from dyad.data.cli.inputs import InputKind, kind_of
    from dyad.data.cli.pack import pack_pairs

    packs = {InputKind.pictures: pack_pairs, InputKind.questions: convert, InputKind.passages: convert_passages}
    packs[kind_of(arguments)](arguments[0], options)


VERBS = (
    Verb(
        "index",
        "SOURCE",
        "scan a source once; list samples and every problem",
        (
            "index shards/",
            "index 'shards/{000..099}.tar' out=manifest.json",
            "index s3://bucket/shards/ workers=8",
            "index nq-train.json",
            "index psgs_w100.tsv",
        ),
        IndexOptions,
        index,
        several=True,
    ),
    Verb(
        "check",
        "SOURCE",
        "read everything, tell what is in there and what is broken",
        (
            "check shards/",
            "check shards/ captions=caption workers=4",
            "check 'train/*.tar::val/*.tar'",
            "check nq-train.json",
            "check train.jsonl corpus=corpus.jsonl",
            "check beir/scifact/ split=test",
        ),
        CheckOptions,
        check,
        several=True,
    ),
    Verb(
        "pack",
        "INPUT",
        "pictures and captions into shards, questions into formats",
        (
            "pack pairs.csv out=shards",
            "pack pairs.csv out=shards csv_separator=, csv_image_key=path csv_caption_key=text",
            "pack pictures/ out=shards on_error=skip",
            "pack pairs.parquet out=shards image_key=image caption_key=captions",
            "pack pairs.jsonl out=shards maxcount=5000 maxsize=5e8",
            "pack nq-train.json out=shards",
            "pack nq-train.json out=nq to=beir",
            "pack beir/scifact/ out=scifact to=tevatron_ids split=train",
            "pack train.jsonl out=dpr to=dpr corpus=corpus.jsonl on_error=skip",
            "pack psgs_w100.tsv out=corpus to=tevatron",
        ),
        PackOptions,
        pack,
    ),
)
FORMER = {
    "unpack": "'unpack' is no verb any more. Unpack with: gunzip -k FILE.gz, or zstd -d FILE.zst",
    "build": "'build' is no verb any more. The builders of data/samples are in tests/build_samples of the repository: "
    "python -m tests.build_samples --help",
}


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in FORMER:
        raise ConfigError(FORMER[sys.argv[1]])
    dispatch("data", PURPOSE, VERBS, sys.argv[1:], CLOSING)
