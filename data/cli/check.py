"""`python -m data check`: reads all data of a source, prints statistics and the faults that training would refuse.

Of each kind of fault the first place and the number are printed. For shards of images, the SHA-256 of every file is
compared with the one in its index, and every image is decoded; captions are read under one name, that of the printed
command: a sample without it is bad. For questions and passages, every row is read as training reads it.
"""

from __future__ import annotations

import shlex
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from operator import iadd

import numpy as np

from dyad.data.base.errors import BadRow, ConfigError, DataError
from dyad.data.base.parallel import parallel_map
from dyad.data.base.progress import print_line, tracked
from dyad.data.base.relevance import if_given
from dyad.data.cli import inputs
from dyad.data.cli.bad_lines import BadLines
from dyad.data.cli.contents import as_trained, caption_name, captions_of, contents, train_command
from dyad.data.cli.index import index_sources, report_problems
from dyad.data.cli.inputs import InputKind, Located, UnreadFields
from dyad.data.cli.options import CheckOptions, ImageTask, table_keys
from dyad.data.image_text.image_files import read_header
from dyad.data.question_passage.passages import InlinePassages, Passage
from dyad.data.question_passage.questions import LISTS
from dyad.data.shards.content_keys import content_key
from dyad.data.shards.index import ShardIndex
from dyad.data.shards.scan_tar import unread_images
from dyad.data.shards.shards import Shards
from dyad.data.shards.sources import ShardSource
from dyad.data.shards.storage import shard_sha256
from dyad.data.tables.folders import unread_in
from dyad.data.tables.image_table import image_table

BLOCK = 512  # samples per task
TASKS_PER_PROCESS = 16  # a process with fewer tasks would spend more time on its imports
LEAKS = 3  # the most contents of both training and evaluation data that are printed
MISSING = ("nan", "null", "none")  # captions that programs write into a table in place of a missing one
INTEGERS = partial(array, "q")  # arrays of 64-bit integers, because there may be many millions


def run(arguments: Sequence[str], options: CheckOptions) -> None:
    """Check all data that the arguments (paths or URLs) name, and print statistics and, except for passages alone, a
    command that trains on them. With options.val, print how much of the data that it names is also in the training
    data. Raises DataError if data are bad, ConfigError for arguments and options that cannot work."""
    check = {InputKind.images: check_shards, InputKind.questions: check_questions, InputKind.passages: check_passages}
    kind = inputs.kind_of(arguments, options)
    samples = check[kind](arguments, options)
    if options.val:
        print_leaks(arguments, options, options.val)
    if kind is InputKind.passages:
        return print("fine: passages alone, for data.passage.corpus")
    named = {"data.train": "::".join(arguments), "data.val": options.val, "data.template": options.template}
    paths = {key: value for key, value in named.items() if value}
    how = train_command(arguments, options, paths, samples, options.split)
    columns = shlex.quote(f"data.columns=[{','.join(options.columns)}]") if options.columns else ""
    print_line(f"fine: train with\n  {how} {columns}".rstrip())


def print_leaks(values: Sequence[str], options: CheckOptions, val: str) -> None:
    """Print how many contents (images, captions, questions, passages) of `val` are also in `values`, with examples.
    values: training data. val: evaluation data, in the syntax of data.val; of a BEIR folder the split test, of
    FOLDER@SPLIT that split. Reads all of both. Raises ConfigError if both hold different kinds of data or one holds
    passages alone, DataError for a row that cannot be read."""
    folder, _, split = val.rpartition("@")
    named = (folder, split) if inputs.is_beir(folder) else (val, "test" if inputs.is_beir(val) else options.split)
    held_out = dict[str, dict[int, str]]()  # kind → content key → where it stands first, and its text
    own = replace(options, split=named[1], relevance=if_given(options.relevance), teacher=if_given(options.teacher))
    for where, held in contents([named[0]], own, "val"):
        for kind, texts in held.items():
            examples = held_out.setdefault(kind, {})
            for key, text in texts.items():
                examples.setdefault(key, f"{where}  {text:.100}")
    both = {kind: set[int]() for kind in held_out}
    for _, held in contents(values, options, "SOURCE"):
        if held.keys() != held_out.keys():
            raise ConfigError(f"val={val} holds {', '.join(held_out) or 'nothing'}; SOURCE {', '.join(held)}")
        for kind, keys in held.items():
            both[kind] |= keys.keys() & held_out[kind].keys()
    for kind, keys in both.items():
        print(f"{kind + 's':<12}{len(keys):,} of {len(held_out[kind]):,} of val stand in the training data too")
        for example in islice((text for key, text in held_out[kind].items() if key in keys), LEAKS):
            print_line(f"  {example}".rstrip())
    if any(both.values()):
        print("warning: val is not unseen. python -m data split keeps what is equal on one side")


def count_repeated(keys: array[int]) -> int:
    """Return the number of entries of `keys` that are equal to an earlier entry."""
    return len(keys) - len(np.unique(np.array(keys, np.int64)))


# ---- images ------------------------------------------------------------------------------------------------------


@dataclass
class ImageFindings:
    """Statistics of samples in shards of images. `a += b` adds the statistics b of other samples to a.

    samples: their number, also bad ones. formats, modes: number of images by file suffix and by PIL's name of the
    colour format. widths, heights: in pixels, of each image. captions: number of captions of each image. words: number
    of words of each caption. missing: number of captions in MISSING. several: images whose txt has a caption of several
    lines. labels: number of images by class. images, texts: content keys of images and captions. bad: messages on bad
    samples.
    """

    samples: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    widths: array[int] = field(default_factory=INTEGERS)
    heights: array[int] = field(default_factory=INTEGERS)
    captions: array[int] = field(default_factory=INTEGERS)
    words: array[int] = field(default_factory=INTEGERS)
    missing: int = 0
    several: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    images: array[int] = field(default_factory=INTEGERS)
    texts: array[int] = field(default_factory=INTEGERS)
    bad: BadLines = field(default_factory=BadLines)

    def __iadd__(self, other: ImageFindings) -> ImageFindings:
        for part in fields(self):
            setattr(self, part.name, iadd(getattr(self, part.name), getattr(other, part.name)))
        return self


def check_shards(values: Sequence[str], options: CheckOptions) -> int:
    """Check all shards of images that `values` name, print statistics, and return the number of samples.

    values: paths or URLs. Each shard is indexed first. If its index lists problems (damaged places in the file), they
    are printed and the samples of this shard are not read. Captions are read as `as_trained` says. Raises DataError for
    a bad row of a table, and at the end if a shard or sample is bad or there is none; ConfigError as `require_images`.
    """
    inputs.require_images(values, options, "SOURCE")
    try:
        sources = inputs.shards_of(values, options, "SOURCE")
    except DataError:  # the conversion of a table stops at the first bad row
        refuse_bad_rows(values, options)
        raise
    indexes = index_sources(sources, options.workers)
    sound = [index for index in indexes if not index.problems]
    options = as_trained(Shards([ShardSource(tuple(index.path for index in sound))], sound), options)
    starts = ((index, start) for index in sound for start in range(0, index.samples, BLOCK))
    tasks = [(index, range(index.samples)[start : start + BLOCK], options) for index, start in starts]
    found = ImageFindings()
    with parallel_map(options.workers, len(tasks) // TASKS_PER_PROCESS) as run_all:
        for index, digest in zip(sound, run_all(shard_sha256, [index.path for index in sound]), strict=True):
            if digest != index.sha256:
                found.bad.add(f"{index.path}: its SHA-256 is not as indexed")
        for part in tracked(run_all(examine, tasks), "decoding", len(tasks)):
            found += part
    print(f"samples     {found.samples:,} in {len(sound)} shards, {sum(index.size for index in sound) / 1e6:,.1f} MB")
    print_line(f"images    {_counts(found.formats)}; modes {_counts(found.modes)}")
    print(f"width       {_quantiles(found.widths)}")
    print(f"height      {_quantiles(found.heights)}")
    if options.task is ImageTask.image_text:
        of_image = f"of an image {_quantiles(found.captions)}; " if len(found.words) > len(found.captions) else ""
        print(f"captions    {len(found.words):,}; {of_image}words {_quantiles(found.words)}")
    if found.labels:
        print_line(f"classes     {len(found.labels):,}: {_counts(found.labels):.200}")
    if found.several:
        print(f"paragraphs  {found.several:,} images have a caption of several lines; caption_per=line splits it")
    if found.missing:
        print(f"warning: {found.missing:,} captions are {' or '.join(MISSING)}, as programs write a missing one")
    for line in _unread(values, options, indexes):
        print_line(f"not read    {line}")
    print(f"duplicates  {count_repeated(found.images):,} images, {count_repeated(found.texts):,} texts")
    print(f"damage      {found.bad.count:,}")
    found.bad.print()
    report_problems(indexes)
    if not found.samples:
        raise DataError(f"{'::'.join(values)}: there is no sample.")
    if found.bad.count:
        raise DataError(
            f"{found.bad.count:,} findings of damage in {found.samples:,} samples. Training takes others in "
            "their place, as data.bad_samples and data.bad_share say; an evaluation stops at them."
        )
    return found.samples


def refuse_bad_rows(values: Sequence[str], options: CheckOptions) -> None:
    """Read all rows of the tables of images that `values` name, and print the faults for which their conversion would
    stop. Raises DataError, with the number of bad rows, if there is one. Images are opened, not decoded."""
    bad, rows = BadLines(), 0
    tables = inputs.tables_and_files(values, options, "SOURCE")[0]
    for images in filter(None, (image_table(table, table_keys(options)) for table in tables)):
        for where, row in images.table.rows():
            rows += 1
            try:
                images.members(row)
            except BadRow as error:
                bad.add(f"{images.table.path}: {where}: {error}")
    if bad.count:
        raise _refused(values, options, bad, rows)


def examine(task: tuple[ShardIndex, range, CheckOptions]) -> ImageFindings:
    """Read and decode samples of one shard, and return their statistics, which list the bad samples. task: the index of
    the shard, the positions of the samples in the shard, and the options of the command."""
    from dyad.data.image_text.sample import ShardSample
    from dyad.data.loading.class_batches import class_key

    index, rows, options = task
    shards, found = Shards([ShardSource((index.path,))], [index]), ImageFindings(samples=len(rows))
    for row in rows:
        try:
            sample = ShardSample.read(shards, row)
            sample.decoded(options.image_key, options.max_image_pixels)
            header = read_header(encoded := sample.image(options.image_key), options.max_image_pixels)
            found.formats[header.suffix] += 1
            found.modes[header.mode] += 1
            found.widths.append(header.width)
            found.heights.append(header.height)
            found.images.append(content_key(encoded))
            captions = captions_of(sample, options)
            sample.relevance(options.relevance)
            found.captions.append(len(captions))
            found.missing += sum(text.strip().lower() in MISSING for text in captions)
            found.several += any("\n" in text for text in captions) and caption_name(sample, options) == "txt"
            if options.task is ImageTask.labelled:
                found.labels[class_key(sample.label(options.label))] += 1
            for text in captions:
                found.words.append(len(text.split()))
                found.texts.append(content_key(text.encode()))
        except DataError as error:
            found.bad.add(str(error))
    return found


def _unread(values: Sequence[str], options: CheckOptions, indexes: Sequence[ShardIndex]) -> Iterator[str]:
    """Yield a line for each tar shard and each folder that has images of a format that is not read."""
    for index in indexes:
        if line := unread_images(Counter(index.ignored)):
            yield f"{index.path}: {line}"
    for folder in (table.path for table in inputs.tables_and_files(values, options, "SOURCE")[0]):
        if line := unread_in(folder):
            yield f"{folder}: {line}"


def _counts(counter: Counter[str]) -> str:
    """Return the names and counts for a printed line, the most frequent first; "none" if there are none."""
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common()) or "none"


# ---- questions and passages ----------------------------------------------------------------------------------------


@dataclass
class PassageStatistics:
    """Statistics of passages. id_hashes: 64-bit hashes of the ids. keys: content keys (hashes of title and text).
    sizes: bytes of each text. scores: given ones. titles: passages with a title. rows: rows that `of` has read."""

    id_hashes: array[int] = field(default_factory=INTEGERS)
    keys: array[int] = field(default_factory=INTEGERS)
    sizes: array[int] = field(default_factory=INTEGERS)
    scores: array[float] = field(default_factory=partial(array, "d"))
    titles: int = 0
    rows: int = 0

    @classmethod
    def of(cls, passages: Located[Passage], bad: BadLines, odd: BadLines) -> PassageStatistics:
        """Return the statistics of passages; messages about them are added to `bad` and `odd`. bad: for each row that
        training refuses, a BadRow or a passage without an id. odd: for each empty passage, which training accepts."""
        found = cls()
        for where, passage in passages:
            found.rows += 1
            if isinstance(passage, BadRow):
                bad.add(f"{where}: {passage}")
                continue
            found.add(passage)
            if passage.id is None:
                bad.add(f"{where}: no id")
            if not passage.text.strip() and not passage.title.strip():
                odd.add(f"{where}: empty passage")
        return found

    def add(self, passage: Passage) -> None:
        """Add a passage to the statistics, except to `rows`."""
        self.keys.append(passage.key)
        self.sizes.append(len(passage.text.encode()))
        self.titles += bool(passage.title)
        self.scores.extend([] if passage.teacher is None else [passage.teacher])
        if passage.id is not None:
            self.id_hashes.append(content_key(passage.id.encode()))

    def __str__(self) -> str:
        return (
            f"{len(self.keys):,}, {self.titles:,} with a title, {count_repeated(self.keys):,} repeat another;"
            f" bytes {_quantiles(self.sizes)}"
        )


def check_questions(values: Sequence[str], options: CheckOptions) -> int:
    """Read every question row of the files that `values` name, and the corpus if there is one, and print statistics.

    Return the number of rows. Raises DataError at the end when training would refuse a row, or if there is no row;
    ConfigError and DataError as `open_input` does.
    """
    source, bad, odd, rows = inputs.open_input(values, options, "SOURCE"), BadLines(), BadLines(), 0
    lengths = {name: INTEGERS() for name in LISTS}  # lengths of each row's lists
    answers, inline = INTEGERS(), PassageStatistics()  # number of answers; passages that stand in the rows themselves
    questions, positives = INTEGERS(), INTEGERS()  # content keys; positives: of those among `inline`
    for where, row in source.rows:
        rows += 1
        if isinstance(row, BadRow):
            bad.add(f"{where}: {row}")
            continue
        right = set(row.positives.keys)
        if any(key in right for name in LISTS[1:] for key in getattr(row, name).keys):  # draw_negatives never draws it
            odd.add(f"{where}: a negative is a positive, too: left out when drawn")
        for name in LISTS:
            passages = getattr(row, name)
            lengths[name].append(len(passages))
            for passage in passages if isinstance(passages, InlinePassages) else ():
                inline.add(passage)
        if isinstance(row.positives, InlinePassages):
            positives.extend(row.positives.keys)
        questions.append(row.question.key)
        answers.append(len(row.question.answers))
    corpus = PassageStatistics.of(source.passages(), bad, odd)
    print(f"questions       {len(questions):,} of {rows:,} rows, {count_repeated(questions):,} repeat another")
    for name, per_row in lengths.items():
        print(f"{name.replace('_', ' '):15} {sum(per_row):,}; per row {_quantiles(per_row)}")
    print(f"answers         {sum(answers):,}, of {len(answers) - answers.count(0):,} questions")
    if inline.keys:
        print(f"passages        {inline}")
    if inline.scores:
        most, pairs = max(map(abs, inline.scores)), not sum(lengths["hard_negatives"])
        fix = f"; objective=cosine_mse needs objective.divisor={most:g}" if pairs and most > 1 else ""
        print(f"scores          {_quantiles(inline.scores)}{fix}")
    if source.corpus:
        print(f"corpus          {corpus}")
    if source.corpus and positives:
        missing = np.isin(np.array(positives, np.int64), source.corpus.keys, invert=True).sum()
        print(f"not in corpus   {missing:,} of the {len(positives):,} positives that are in the rows")
    return _finish(values, options, source.unread, bad, odd, rows)


def check_passages(values: Sequence[str], options: CheckOptions) -> int:
    """Read every passage of the files that `values` name, and print statistics. Return the number of rows.

    The files hold passages only, no questions. Raises DataError at the end when a passage cannot be read, has no id or
    repeats the id of another one, or when there is no row; other errors as of `open_passages`.
    """
    bad, odd, unread = BadLines(), BadLines(), UnreadFields()
    found = PassageStatistics.of(inputs.open_passages(values, "SOURCE", unread, options), bad, odd)
    for line in _repeated_ids(values, found, options) if count_repeated(found.id_hashes) else ():
        bad.add(line)
    print(f"passages        {found}")
    return _finish(values, options, unread, bad, odd, found.rows)


def _repeated_ids(values: Sequence[str], found: PassageStatistics, options: CheckOptions) -> Iterator[str]:
    """Yield a message for each passage that repeats the id of an earlier one. Reads all files again, because the
    statistics in `found` have only hashes of the ids."""
    hashes, counts = np.unique(np.array(found.id_hashes, np.int64), return_counts=True)
    repeated, first = set(hashes[counts > 1].tolist()), dict[str, str]()
    for where, passage in inputs.open_passages(values, "SOURCE", UnreadFields(), options):
        if isinstance(passage, Passage) and passage.id and content_key(passage.id.encode()) in repeated:
            if passage.id in first:
                yield f"{where}: id '{passage.id}' again, first at {first[passage.id]}"
            first.setdefault(passage.id, where)


def _refused(values: Sequence[str], options: CheckOptions, bad: BadLines, rows: int) -> DataError:
    """Print the messages about bad rows, at least one, and return the error that ends the command."""
    bad.print()
    pack = shlex.join(["::".join(values), "out=packed", *table_keys(options).as_args(), "on_error=skip"])
    some = f" Without bad rows: python -m data pack {pack}" if bad.count < rows else ""
    return DataError(f"{bad.count:,} problems in {rows:,} rows. Training refuses them.{some}")


def _quantiles(values: array[int] | array[float]) -> str:
    """Return minimum, median, 95th percentile and maximum for a printed line; "none" without values."""
    names, shares = ("min", "median", "95th percentile", "max"), [0, 0.5, 0.95, 1]
    found = np.quantile(np.array(values), shares, method="nearest") if values else []
    return ", ".join(f"{name} {value:g}" for name, value in zip(names, found, strict=False)) or "none"


def _finish(
    values: Sequence[str], options: CheckOptions, unread: UnreadFields, bad: BadLines, odd: BadLines, rows: int
) -> int:
    """Print the end of the report on questions or passages: the fields that the readers did not use, odd rows, which
    training accepts, and bad rows, which it refuses. Return `rows`, the number of rows that were read. Raises DataError
    when there is a bad row, or no row at all."""
    print(f"not read        {str(unread) or 'nothing'}")
    odd.print("warning")
    if bad.count:
        raise _refused(values, options, bad, rows)
    if not rows:
        raise DataError(f"{'::'.join(values)}: there is no row.")
    return rows
