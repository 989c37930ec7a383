"""The main program of `python -m data VERB`, for the verbs in VERBS. The module of a verb is imported when it runs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dyad.data.base.command_line import HELP, key_table, parse_options, split_arguments
from dyad.data.base.errors import ConfigError, nearest
from dyad.data.cli import options as of_verbs

PURPOSE = """Data for both tasks: list what is in it and what is broken, check it, pack and convert it.
  images and captions    shards: .tar files (webdataset); tables: CSV, Parquet (as on the Hugging Face hub, images
                           inside, or paths), Arrow, JSON-lines, COCO captions; folders of images with .txt files,
                           metadata.csv or one folder for each class (template='a photo of a {}');
                           task=labelled: classes without captions; task=views: images alone
  questions and passages   tables or JSON-lines with sentence-transformers' columns (anchor, positive, negative, …),
                           DPR .json or .jsonl, Tevatron .jsonl (passages inside, or by id from a corpus),
                           FlagEmbedding .jsonl, MS MARCO triples, BEIR folders, shards of these; passages alone:
                           .jsonl, or .tsv with id, text, title
Training takes all of these as they are. Columns of other names: columns=[picture,caption] or
columns=[question,positive,negative]. Tables without byte offsets are converted once, into .index/ beside them or
your cache, up to 8 GiB; larger ones, and those with bad rows, by `pack`.
A SOURCE is a file, its folder, a glob, 'd/{000..099}.tar', several joined as 'a.tar::b.tar', or a URL.
Compressed files cannot be read by offset: unpack them first, with gunzip -k FILE.gz or zstd -d FILE.zst. Only
`sequences` reads them as they are.
Shards that training refuses are packed anew, with what is sound in them: pack x.tar out=mended on_error=skip."""
CLOSING = """Keys and more examples: python -m data VERB --help
Quote braces and globs. Exit codes: 0 ok, 2 a command that cannot work, 3 damaged data."""


@dataclass(frozen=True)
class Verb:
    """A verb of `python -m data`, such as index.

    The module of the same name, in the folder data/cli or data/build, has a function run(plain arguments, options);
    options.py has the dataclass of its options, such as IndexOptions. purpose: its line in the help. argument: the name
    of a plain argument (one without key=) in messages. There may be several SOURCE, because a shell expands braces and
    globs, but only one INPUT, CORPUS or QUESTIONS. folder: "cli" or "build".
    """

    name: str
    purpose: str
    argument: str = "SOURCE"
    folder: str = "cli"

    @property
    def options(self) -> type:
        """The dataclass of the verb's key=value options."""
        return getattr(of_verbs, f"{self.name.capitalize()}Options")

    @property
    def examples(self) -> list[str]:
        """The lines of EXAMPLES that begin with this verb."""
        return [line for line in EXAMPLES.split("\n") if line.startswith(self.name)]


VERBS = (
    Verb("index", "scan a source once; list samples and every problem"),
    Verb("check", "read everything, tell what is in there and what is broken"),
    Verb("pack", "images and captions into shards, questions into formats", "INPUT"),
    Verb("split", "part of it for validation, without a copy on both sides"),
    Verb("continuations", "prompts, right and wrong answers for a language model", "CORPUS", "build"),
    Verb("negatives", "training data for DPR by BM25, from answers or judgements", "QUESTIONS", "build"),
    Verb("sequences", "logs to train, validate and test on, from a log or a corpus", "INPUT", "build"),
    Verb("weights", "log q of each item, from how often it is a positive", folder="build"),
)
EXAMPLES = """
index shards/
index 'shards/{000..099}.tar' out=manifest.json
index s3://bucket/shards/ workers=8
index nq-train.json
index psgs_w100.tsv
check shards/
check shards/ captions=caption workers=4
check classes/ task=labelled
check 'train/*.tar::val/*.tar'
check nq-train.json
check pairs.parquet
check train.jsonl corpus=corpus.jsonl
check beir/scifact/ split=test
check shards/ val=held_out.tar
pack pairs.csv out=shards
pack pairs.parquet out=shards columns=[picture,words]
pack images/ out=shards on_error=skip
pack classes/ out=shards 'template=a photo of a {}'
pack captions_train2017.json out=shards maxcount=5000 maxsize=5e8
pack st.csv out=dpr to=dpr columns=[question,answer]
pack nq-train.json out=shards
pack nq-train.json out=nq to=beir
pack beir/scifact/ out=scifact to=tevatron_ids split=train
pack train.jsonl out=dpr to=dpr corpus=corpus.jsonl on_error=skip
pack psgs_w100.tsv out=corpus to=tevatron
pack broken.tar out=mended on_error=skip
pack pairs.csv out=parts val=0.05
split shards/ out=parts
split shards/ out=parts val=0.05 by=picture
split beir/scifact/ out=parts
continuations corpus.jsonl out=halves
continuations corpus.jsonl out=halves 'group_of=(.*)[.][0-9]+' wrong=3
continuations corpus.jsonl out=halves 'group_of=(.*)[.][0-9]+' examples=2
negatives beir/scifact/ out=train.jsonl
negatives nq-train.qa.csv out=nq.jsonl corpus=psgs_w100.tsv
negatives questions.jsonl out=train.jsonl corpus=corpus.jsonl answers=answer depth=50 negatives=10
negatives beir/scifact/ out=train.jsonl passages=ids
sequences clicks.csv out=log
sequences ratings.csv.gz out=log user=user_id item=movie_id time=timestamp
sequences ratings.dat out=log columns=[user,item,rating,time]
sequences clicks.parquet out=log split=time val=0.05 test=0.05
sequences corpus.jsonl out=chapters 'user_of=(.*)[.][0-9]+' split=user
sequences beir/scifact/ out=cited 'user_of=(.*)'
weights nq-train.json out=q.safetensors
weights shards/ out=log_q.safetensors power=0.75
weights train.jsonl out=log_q.safetensors corpus=corpus.jsonl add=1
"""


def main() -> None:
    """Run the verb of `python -m data` that the first command-line argument names, or print help.

    Raises ConfigError for an unknown verb, and the errors of `parse_verb` and of the verb.
    """
    name, *rest = sys.argv[1:] or ["help"]
    named = {verb.name: verb for verb in VERBS}
    if name in HELP:
        examples = [f"  {f'python -m data {verb.examples[0]}':58} {verb.purpose}" for verb in VERBS]
        print("\n".join([PURPOSE, "", *examples, "", CLOSING]))
    elif name not in named:
        raise ConfigError(f"unknown verb '{name}'.{nearest(name, named)} There is: {', '.join(named)}.")
    elif set(HELP) & set(rest):
        print(verb_help(named[name]))
    else:
        import_module(f"dyad.data.{named[name].folder}.{name}").run(*parse_verb(named[name], rest))


def parse_verb(verb: Verb, arguments: Sequence[str]) -> tuple[list[str], Any]:
    """Split the arguments of a verb into a list of plain ones (paths or URLs) and an object with its options.

    The object is of the dataclass `verb.options`. Raises ConfigError as `parse_options` does, and for too few or too
    many plain arguments. Whether a needed `out` is missing is left to the verb.
    """
    plain, keys = split_arguments(arguments)
    options = parse_options(verb.options, keys, f"python -m data {verb.name}")
    if not plain or (len(plain) > 1 and verb.argument != "SOURCE"):
        got = "is missing" if not plain else f"is one, not {len(plain)}: {' '.join(plain)}"
        raise ConfigError(f"{verb.argument} {got}. For example: python -m data {verb.examples[0]}")
    return plain, options


def verb_help(verb: Verb) -> str:
    """Return the text that `python -m data VERB --help` prints."""
    several = "..." if verb.argument == "SOURCE" else ""
    usage = f"usage: python -m data {verb.name} {verb.argument}{several} [key=value ...]"
    examples = [f"  python -m data {example}" for example in verb.examples]
    return "\n".join([f"{verb.name}: {verb.purpose}", "", usage, "", *examples, "", *key_table(verb.options)])
