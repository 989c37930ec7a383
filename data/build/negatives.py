"""`python -m data negatives`: DPR's training rows from questions, a corpus and BM25.

The rule is that of Karpukhin et al. 2020 (section 3.2 and their data). BM25 finds the best `depth` passages of a
question. The best ranked passage with an answer is its positive; the passages without an answer are its hard negatives,
best ranked first. A question without a positive is left out and counted. If a question has right passages already, such
as those of judgements, these are its positives. A passage is never a negative if it is right, has the content of a
right passage, has an answer, or equals the question. Each question gives one line of a file, which is kept when the
command is stopped. The rows depend neither on stops nor on the number of processes.
"""

import json
from array import array
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.base.files import open_foreign, setting_errors, whole_file
from dyad.data.base.parallel import parallel_map
from dyad.data.base.progress import print_line, progress, tracked
from dyad.data.build.questions import open_built_of
from dyad.data.build.summary import Summary, example
from dyad.data.build.unfinished import lines_done, unfinished
from dyad.data.cli.options import NegativesOptions, PassagesOfRows, Target
from dyad.data.cli.outputs import checked_new_file, question_command
from dyad.data.cli.writers import JSON_ROWS, RELEVANCE, ROWS
from dyad.data.config import PassageConfig
from dyad.data.question_passage.answers import answer_finder
from dyad.data.question_passage.bm25 import open_bm25
from dyad.data.question_passage.corpus import Corpus, CorpusPassages
from dyad.data.question_passage.formats import record_of
from dyad.data.question_passage.passages import InlinePassages
from dyad.data.question_passage.questions import QuestionRow, row_of
from dyad.data.shards.content_keys import Int64s, json_digest
from dyad.data.tables.image_table import json_bytes

FORMAT = 1
BLOCK = 256  # questions between two writes of finished lines to the file
TARGETS = {PassagesOfRows.inside: Target.dpr, PassagesOfRows.ids: Target.tevatron_ids}
# options on which the content of rows depends
DECIDE = "depth negatives all_positives answers match passages columns pos_pool relevance teacher".split()
EXAMPLES = 3


def run(arguments: Sequence[str], options: NegativesOptions) -> None:
    """Build the training rows of the questions that the only argument names, in the new file options.out.

    Prints a summary and a command that trains on them. A build that was stopped continues where it stopped, if data and
    options are the same. Raises ConfigError for options that cannot work, DataError for damaged data and if no question
    has a positive.
    """
    if options.passages is PassagesOfRows.ids and not (options.out or "").endswith(".jsonl"):
        raise ConfigError(f"passages=ids with out={options.out}: such rows are lines of a .jsonl file")
    (source,), out = arguments, checked_new_file(options.out, [*JSON_ROWS])
    with unfinished(out) as work:
        builder = Builder(source, options, Path(options.index or work))
        done, lines = lines_done(work / "rows", builder.identity), work / "rows"
        if done:
            print_line(f"goes on after {done:,} of {len(builder):,} questions, where a build was stopped")
        with (
            progress("questions", len(builder), done) as on_progress,
            parallel_map(options.workers, -(-(len(builder) - done) // BLOCK)) as mapped,
            lines.open("ab") as file,
        ):
            for start in range(done, len(builder), BLOCK):
                block = range(start, min(start + BLOCK, len(builder)))
                file.writelines(mapped(builder.line, block))
                file.flush()
                on_progress(block.stop)
        summary, examples = _finish(lines, out, builder.corpus)
    for line in (*summary.lines(options.depth), *examples):
        print_line(line)
    paths: dict[str, str | Path] = {"data.train": out}
    if options.passages is PassagesOfRows.ids:
        paths["data.passage.corpus"] = options.corpus or source
    elif options.relevance is not None:
        paths["data.relevance"] = RELEVANCE[Target.dpr]
    print_line(f"{len(summary.negatives):,} rows in {out}; train on them:")
    print_line(f"  {question_command(paths, len(summary.negatives), 'objective=dpr')}")


class Builder:
    """Makes the training rows of questions, by number. len(builder) is the number of questions.

    The constructor opens the questions and the corpus, and opens or builds the BM25 index. A pickled Builder is opened
    anew, once in each process. source: names the questions. folder: folder of the BM25 index, made if needed. corpus:
    the passages that are searched. identity: a digest of the data, of the options in DECIDE and of the version of
    bm25s. The constructor raises ConfigError if the folder cannot be made, and errors as `open_built_of` and
    `open_bm25` do.
    """

    def __init__(self, source: str, options: NegativesOptions, folder: Path) -> None:
        self._made_of, self._options = (source, options, folder), options
        self._questions, self.corpus = open_built_of(source, options)
        corpus = self.corpus
        passages = tracked((corpus[i] for i in range(len(corpus))), "BM25 index", len(corpus))
        with setting_errors(f"index={folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        self._bm25 = open_bm25((f"{each.title} {each.text}" for each in passages), folder, corpus.fingerprint)
        own = [str(getattr(options, name)) for name in DECIDE]
        self.identity = json_digest([FORMAT, self._questions.fingerprint, corpus.fingerprint, version("bm25s"), *own])

    def __len__(self) -> int:
        return len(self._questions)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, self._made_of

    def line(self, i: int) -> bytes:
        """Return the line of question i in the file of finished lines, as bytes with a newline.

        It is JSON with its numbers for Summary.add, a tab, and its training row as JSON (empty if it has no positive).
        Raises ConfigError for passages inside rows if options.passages asks for ids, DataError for a damaged row.
        """
        found = self._questions.row(i)
        ((_, hits),) = self._bm25.search([found.question.text], self._options.depth)
        inside = len(found.positives) and isinstance(found.positives, InlinePassages)
        if inside and self._options.passages is PassagesOfRows.ids:
            raise ConfigError("passages=ids: QUESTIONS has passages inside its rows, not ids. Take passages=inside")
        row, rank = self._judged(found, hits)
        if not len(row.positives):
            missed = f"no answer in the best {self._options.depth} passages"
            why = missed if found.question.answers else "neither answers nor right passages"
            return b'{"why": "%s"}\t\n' % why.encode()
        head = {"rank": rank, "positives": len(row.positives), "negatives": len(row.hard_negatives)}
        fields = ROWS[TARGETS[self._options.passages]][1](row, Counter())
        return json.dumps(head).encode() + b"\t" + json_bytes(fields) + b"\n"

    def _judged(self, found: QuestionRow, hits: Int64s) -> tuple[QuestionRow, int | None]:
        """Return the training row of a question, and the rank, from 1, of its best positive among `hits`; None if no
        positive is among them. found: the question with its known right passages. hits (k,) int64: positions in the
        corpus of the passages that BM25 found, best first."""
        options, corpus, right = self._options, self.corpus, set(found.positives.keys)
        answers = answer_finder(found.question.answers, options.match)
        ranks, by_answer, wrong = list[int](), dict[int, int](), dict[int, int]()  # positions by content key
        for rank, (position, key) in enumerate(zip(hits.tolist(), corpus.keys[hits].tolist(), strict=True), start=1):
            if key in right:
                ranks.append(rank)
                continue
            if len(wrong) >= options.negatives and (right or (by_answer and not options.all_positives)):
                continue
            passage = corpus[position]
            if answers.within(passage.text):
                if not right:
                    ranks.append(rank)
                    by_answer.setdefault(key, position)
            elif passage.text != found.question.text:
                wrong.setdefault(key, position)
        chosen = [*by_answer.values()][: None if options.all_positives else 1]
        positives = found.positives if right else CorpusPassages(corpus, np.array(chosen, np.int64))
        negatives = CorpusPassages(corpus, np.array([*wrong.values()][: options.negatives], np.int64))
        row = QuestionRow(found.question, positives, InlinePassages(), negatives, relevance=found.relevance)
        return row, min(ranks, default=None)


_OPEN: dict[str, Builder] = {}  # the open Builder of this process, by its arguments; at most one


def _opened(source: str, options: NegativesOptions, folder: Path) -> Builder:
    """Return the Builder of these arguments, which a worker process opens once and keeps for all its questions."""
    key = repr((source, options, folder))
    if key not in _OPEN:
        _OPEN.clear()
        _OPEN[key] = Builder(source, options, folder)
    return _OPEN[key]


# ---- the end -------------------------------------------------------------------------------------------------------


def _finish(lines: Path, out: Path, corpus: Corpus) -> tuple[Summary, list[str]]:
    """Write the rows of the complete file `lines` to the file `out`, atomically.

    Return the summary, and lines to print for at most EXAMPLES rows. Raises DataError if there is no row, and if
    `lines` is damaged.
    """
    summary, starts = Summary(), array("q")
    with open_foreign(lines) as file, whole_file(out) as new, JSON_ROWS[out.suffix](new) as add:
        at = len(file.readline())
        for line in file:
            head, _, row = line.rstrip(b"\n").partition(b"\t")
            try:
                summary.add(json.loads(head))
            except ValueError as error:  # after a power cut
                raise DataError(f"{lines} is damaged: delete {lines.parent} and build anew") from error
            if row:
                add({"json": row})
                starts.append(at + len(head) + 1)
            at += len(line)
        if not starts:
            raise DataError(f"no question has a positive ({summary.reasons}). Is it the corpus of these questions?")
        chosen = dict.fromkeys(starts[i * (len(starts) - 1) // (EXAMPLES - 1)] for i in range(EXAMPLES))
        rows = (_row_at(file, start, corpus) for start in chosen)
        return summary, [line for row in rows for line in example(row)]


def _row_at(file: BinaryIO, start: int, corpus: Corpus) -> QuestionRow:
    """Read the training row that begins at byte `start` of the file of finished lines."""
    file.seek(start)
    return row_of(record_of(json.loads(file.readline()), PassageConfig()), corpus, "the new row", "corpus")
