"""Count the texts of data.train that are longer than the text tower takes: training cuts them, and says nothing.

Only the start of the first and of the last file is read, so that a large or remote file costs little: 4 MiB, 16 MiB of
a shard of images, 1,000 rows of a table.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from io import BufferedReader, BytesIO
from itertools import islice
from typing import Any, TypeVar

from dyad.data.base.arrays import evenly_spaced
from dyad.data.base.errors import BadRow, SampleError, UserError
from dyad.data.base.findings import Finding, ok, warn
from dyad.data.image_text.sample import ShardSample
from dyad.data.question_passage.corpus import corpus_files, corpus_of
from dyad.data.question_passage.formats import passage_of, query_of, record_of
from dyad.data.question_passage.judgements import queries_of
from dyad.data.question_passage.passages import Passage, Question, Rendered
from dyad.data.question_passage.questions import is_beir
from dyad.data.question_passage.text_views import text_of
from dyad.data.shards.index import scan_stream
from dyad.data.shards.rows import parse_row
from dyad.data.shards.scan_rows import header
from dyad.data.shards.scan_tar import Scan
from dyad.data.shards.sources import WrittenSource, local_path, written_sources
from dyad.data.shards.storage import open_ranges, scheme_of, stat
from dyad.data.tables.folders import tables_of
from dyad.data.tables.image_table import TableOptions, image_table
from dyad.data.tables.prepare import checked_tables, named_texts, table_options
from dyad.data.tables.readers import Table
from dyad.run.checks import training_files
from dyad.train.config import LISTED, ItemKind, Task, TrainConfig

TEXTS = 1000  # the most texts of a kind that are counted, and the most rows of a table that are read
HEAD = 4 << 20  # bytes of a file that are read, from its start
HEAD_OF_IMAGES = 16 << 20  # the same for a shard of images, whose texts are a small part

QUESTIONS, PASSAGES = "data.question.length", "data.passage.length"
Fields = dict[str, Any]
T = TypeVar("T")


def cut_texts(config: TrainConfig, tokenize: Any) -> Iterator[Finding]:
    """Yield a finding on each kind of text in data.train: how many of at most 1,000 the text tower would cut.

    Kinds are captions, questions, passages and the like. It is a warning if any text is cut. tokenize: the tokenizer of
    the model. Nothing is yielded without data.train, for task=sequence, with a tokenizer without `full_lengths` (that
    of a plugin), and for data that cannot be read, which the check of the data reports.
    """
    if config.data.train is None or config.task is Task.sequence or not hasattr(tokenize, "full_lengths"):
        return
    with suppress(UserError, OSError):
        for word, key, texts in _texts_by_kind(config):
            if texts:
                yield _finding(word, key, texts, config, tokenize)


def _finding(word: str, key: str | None, texts: Sequence[Rendered], config: TrainConfig, tokenize: Any) -> Finding:
    """Return the finding on the texts of one kind: a warning if one of them is longer than the tower takes.

    word: what they are, such as "captions". key: QUESTIONS or PASSAGES, the configuration key whose value is the most
    tokens of such a text; None: the tower's own number counts. texts: (text, None), or (title, text) of a passage that
    is read as a pair.
    """
    pairs = [second for _, second in texts if second is not None]
    firsts = [first for first, _ in texts]
    counts = tokenize.full_lengths(firsts, pairs) if pairs else tokenize.full_lengths(firsts)
    if key is None:
        most, name = tokenize.context_length, f"the {tokenize.context_length} tokens of the text tower"
        fix = "put first what matters, or shorten them; a tower with more positions takes model.text.context_length"
    else:
        most = config.data.question.length if key == QUESTIONS else config.data.passage.length
        name = f"{key}={most} tokens"
        longer = f"{key}=N, at most {tokenize.limit} for this model; or " * (most < tokenize.limit)
        fix = f"{longer}split or shorten them"
    if config.task is Task.language_model and key == QUESTIONS:
        counts = [count + 1 for count in counts]  # a token begins each prompt
        if (left := tokenize.limit - config.data.passage.length) < most:
            most, name = left, f"the {left} tokens that answers of {PASSAGES} leave of the model's {tokenize.limit}"
    cut, longest = sum(count > most for count in counts), f"the longest has {max(counts):,}"
    if not cut:
        return ok("texts", f"{word}: none of {len(counts):,} is longer than {name}; {longest}")
    verb = "is" if cut == 1 else "are"
    return warn("texts", f"{word}: {cut:,} of {len(counts):,} {verb} longer than {name} and {verb} cut; {longest}", fix)


# The texts of each task -----------------------------------------------------------------------------------------------


def _texts_by_kind(config: TrainConfig) -> Iterator[tuple[str, str | None, list[Rendered]]]:
    """Yield (word, key, texts as the tokenizer gets them) for each kind of text that the towers of the run read.

    word, key and texts are as in `_finding`; at most TEXTS texts of a kind. Raises UserError or OSError for data that
    cannot be read.
    """
    data = config.data
    if config.task is Task.image_text:
        yield "captions", None, [(text, None) for text in _evenly_spaced(_of_files(config, _captions))]
    elif config.task in LISTED:
        found = _of_files(config, _listed)
        questions = [text for text in found if isinstance(text, Question)]
        passages = [text for text in found if isinstance(text, Passage)]
        passages += [passage for file in _corpus(config) for passage in _rows(file, config, passage_of)]
        words = ("prompts", "answers") if config.task is Task.language_model else ("questions", "passages")
        yield words[0], QUESTIONS, [text.rendered(data.question) for text in _evenly_spaced(questions)]
        yield words[1], PASSAGES, [text.rendered(data.passage) for text in _evenly_spaced(passages)]
    elif config.data.items is ItemKind.texts:
        texts = _of_files(config, lambda path, _, own: _rows(path, own, text_of))
        yield "texts", PASSAGES, [text.rendered(data.passage) for text in _evenly_spaced(texts)]


def _evenly_spaced(texts: Sequence[T]) -> list[T]:
    """Return at most TEXTS (1,000) of the texts, evenly spaced from the first to the last."""
    return [texts[i] for i in evenly_spaced(len(texts), TEXTS)]


def _of_files(config: TrainConfig, read: Callable[[str, WrittenSource, TrainConfig], Iterator[T]]) -> list[T]:
    """Return what `read` yields for the first file of the first source of data.train and the last of the last.

    read: gets the path of the file, its source, and the configuration.
    """
    written = written_sources(config.data.train or "", "data.train")
    ends = list[tuple[str, WrittenSource]]()
    for end, source in ((0, written[0]), (-1, written[-1])):
        ends.append((training_files(replace(config, data=replace(config.data, train=source.path)))[end], source))
    return [text for file, source in dict.fromkeys(ends) for text in read(file, source, config)]


def _captions(path: str, source: WrittenSource, config: TrainConfig) -> Iterator[str]:
    """Yield the captions (data.captions) at the start of a shard or table of images; invalid samples are left out."""
    data, table = config.data, _table(path, config)
    if images := table and image_table(table, table_options(data)):
        for row in _first_rows(images.table):
            with suppress(BadRow):  # training replaces such samples, here and below
                yield from images.captions(row)
    for key, members, _ in [] if table else _samples(path, HEAD_OF_IMAGES):
        for name in data.captions:
            with suppress(SampleError):
                yield from ShardSample(path, key, members).captions(name, data.caption_per)


def _listed(path: str, source: WrittenSource, config: TrainConfig) -> Iterator[Question | Passage]:
    """Yield the questions (or prompts) of a file, and the passages in its rows that training draws from.

    They have the prefixes of the source. Passages that rows name by id are not yielded: `_corpus` returns their files.
    """
    data = config.data
    names = ["positives", *[name for name in data.negatives.lists if data.negatives.per_row]]

    def texts(fields: Fields) -> list[Question | Passage]:
        record = record_of(fields, data.passage, data.relevance, data.teacher)
        listed = (passage for name in names for passage in getattr(record, name, ()))
        passages = [replace(each, prefix=source.passage_prefix) for each in listed if isinstance(each, Passage)]
        return [replace(record.question, prefix=source.question_prefix), *passages]  # without ids of the corpus

    if is_beir(source.path):
        for question in _rows(queries_of(path), config, query_of):
            yield replace(question, prefix=source.question_prefix)
    else:
        for found in _rows(path, config, texts):
            yield from found


def _corpus(config: TrainConfig) -> list[str]:
    """Return the first and the last file of the passages that rows of data.train name by id; [] if there is none.

    They are those of data.passage.corpus, or else the corpora of BEIR or MS MARCO folders.
    """
    files = [corpus_of(local_path(each.path)) for each in written_sources(config.data.train or "", "data.train")]
    if value := config.data.passage.corpus:
        files = corpus_files(value, "data.passage.corpus", checked_tables(TableOptions()))
    found = [file for file in files if file is not None]
    return [*dict.fromkeys([*found[:1], *found[-1:]])]


# Rows and samples of a file -------------------------------------------------------------------------------------------


def _rows(path: str, config: TrainConfig, convert: Callable[[Fields], T]) -> Iterator[T]:
    """Yield convert(fields) for the rows at the start of a file of texts (4 MiB) or of a table (1,000 rows).

    Rows for which it raises BadRow are left out.
    """
    options, table = table_options(config.data), _table(path, config)
    for row in _first_rows(table) if table else ():
        with suppress(BadRow):
            yield convert(named_texts(row, options))
    for _, members, columns in [] if table else _samples(path, HEAD):
        with suppress(BadRow):
            yield convert(parse_row(members, columns))


def _table(path: str, config: TrainConfig) -> Table | None:
    """Return the (first) table at `path`; None for a URL, and for a shard or file of rows, which `_samples` reads."""
    return None if scheme_of(path) else next(iter(tables_of(path, config.data.columns)), None)


def _first_rows(table: Table) -> Iterator[Fields]:
    """Yield the rows that can be read among the first TEXTS (1,000) rows of a table."""
    yield from (row for _, row in islice(table.rows(), TEXTS) if not isinstance(row, BadRow))


def _samples(path: str, most: int) -> Iterator[tuple[str, dict[str, bytes], Callable[[], tuple[list[str], bool]]]]:
    """Yield (key, members, columns) for each sample that is whole in the first `most` bytes of a shard or file of rows.

    members: suffix → bytes. columns: a function that returns what `header` does of the first line, the columns of a
    file whose rows are lines with separators.
    """
    head = open_ranges(path)(0, min(stat(path).size, most))
    scan = scan_stream(BufferedReader(BytesIO(head)), path)  # a sample that the end cuts is a problem, and left out
    if isinstance(scan, Scan):
        found = [(sample.key, sample.members) for sample in scan.samples]
    else:
        rows = zip(scan.key, scan.offset, scan.size, strict=True)
        found = [(str(key), [(scan.suffix, offset, size)]) for key, offset, size in rows]
    for key, members in found:
        content = {suffix: head[offset : offset + size] for suffix, offset, size in members}
        yield key, content, lambda: header(head.split(b"\n", 1)[0])
