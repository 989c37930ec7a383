"""`python -m data pack` for questions and passages: converts files of any format to another, and reports the parts that
the new format cannot hold."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dyad.data.base.errors import ConfigError, sound
from dyad.data.cli.inputs import InputQuestions, UnreadFields, open_input, open_passages
from dyad.data.cli.options import PackOptions, Target
from dyad.data.cli.outputs import Tally, checked_new_folder, file_names, index_new, new_folder, question_command
from dyad.data.cli.split import split_packed
from dyad.data.cli.writers import CORPORA, RELEVANCE, TEACHER, corpus_writer, row_writer, written_ids
from dyad.data.question_passage.corpus import CorpusPassages
from dyad.data.question_passage.passages import InlinePassages
from dyad.data.question_passage.questions import LISTS, QuestionRow

BY_ID = (Target.tevatron_ids, Target.beir)  # formats whose rows name passages of a corpus


@dataclass
class ConversionReport:
    """Counts of what happened to the parts of an input (questions, passages, titles, …) in a conversion.

    target: the new format. tally: counts of the rows that were read and skipped. unread: fields of the input that the
    readers do not use. The others have names of parts as keys: written: parts written to the new files. joined: parts
    not written, because an equal one was written before. dropped: parts that the new format cannot hold. margins:
    whether the teacher's scores are differences: that of every hard negative is 0.
    """

    target: Target
    tally: Tally
    unread: UnreadFields
    written: Counter[str] = field(default_factory=Counter)
    joined: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    margins: bool = True

    def print(self, out: Path) -> None:
        """Print the counts of the conversion, in the order written, skipped, joined, dropped, not read.

        out: the folder that was written. Lines of zeros are left out.
        """
        name = self.target.name
        print(f"{_counts(self.written)} in {out} ({name}), indexed")
        if self.tally.skipped:
            print(self.tally)
        if joined := _counts(self.joined):
            print(f"joined, since {name} has each once: {joined}")
        if dropped := _counts(self.dropped):
            print(f"dropped, since {name} cannot hold them: {dropped}")
        if unread := str(self.unread):
            print(f"not read: {unread}")


def _counts(counter: Counter[str]) -> str:
    """Return the counts above 0 with their names for a printed line; "" if there are none."""
    return ", ".join(f"{count:,} {what}" for what, count in counter.items() if count)


# ---- questions -----------------------------------------------------------------------------------------------------


def convert(source: str, options: PackOptions) -> None:
    """Convert the questions of an input to the format `options.to`, in the new folder `options.out`.

    Prints a report. With options.val the new files are split into train/ and val/. source: paths or URLs, in the syntax
    of data.train. Raises ConfigError for options that cannot work. With on_error=stop a bad row raises DataError,
    naming file and line, and the folder is not made. With on_error=skip bad rows are left out, but the new corpus may
    still hold their passages; DataError is raised if no row remains. A bad passage of the input's corpus raises
    DataError in either case.
    """
    out = checked_new_folder(options.out)
    questions = open_input(source, options, "INPUT")
    report = ConversionReport(options.to, Tally(options.on_error), questions.unread)
    with new_folder(out) as folder:
        _write(questions, folder, options, report)
        report.tally.check_any(source)
        files, trained = file_names(index_new(folder)), report.written["questions"]
        paths = {"data.train": Path() if options.to is Target.beir else files}
        if options.to is Target.tevatron_ids:
            paths["data.passage.corpus"] = Path(CORPORA[options.to][0])
        if options.val:
            paths, trained = split_packed(folder, paths, options)
    report.print(out)
    named = options.to is Target.beir and options.split != "train" and not options.val
    split = [f"data.question.split={options.split}"] if named else []
    fields = ("relevance", options.relevance, RELEVANCE), ("teacher", options.teacher, TEACHER)
    told = {f"data.{name}": of[options.to] for name, field, of in fields if field and options.to in of}
    paths = {key: out / path for key, path in paths.items()} | told
    negatives = report.written["negatives"] + report.written["hard negatives"] > 0
    if options.teacher and not negatives and "data.teacher" not in paths:
        return print(
            f"without their scores, pairs cannot be trained on: to={Target.dpr} and to={Target.flag} hold them"
        )
    print(f"train on them:\n  {question_command(paths, trained, *split, negatives=negatives, margins=report.margins)}")


def _write(questions: InputQuestions, folder: Path, options: PackOptions, report: ConversionReport) -> None:
    """Write all question rows of an input, with their passages, as files of the format `options.to` in `folder`.

    Counts in `report`, by kind (questions, titles, …), what was written, rows whose question an earlier row had
    ("joined"), and what the format cannot hold ("dropped"). Errors as of `convert`.
    """
    target, source, tally = options.to, questions.corpus, report.tally
    named = np.zeros(len(source or ()), bool)  # passages of the source's corpus that a row names
    with ExitStack() as stack:
        written, corpus = stack.enter_context(written_ids(folder)), None
        if target in BY_ID or (source and target in CORPORA):  # the format needs a corpus, or allows that of the source
            corpus = stack.enter_context(corpus_writer(folder, target, written, source, report.dropped))
            corpus.copy(passage for _, passage in questions.passages())
        write = stack.enter_context(row_writer(folder, options, written))
        for where, row in questions.rows:
            with tally.row(where):
                row = sound(row)
                lists = [getattr(row, name) for name in LISTS]
                if corpus and target in BY_ID:
                    corpus.add(p for passages in lists if isinstance(passages, InlinePassages) for p in passages)
                inline = (InlinePassages([*passages]) for passages in lists)  # read once
                whole = QuestionRow(row.question, *inline, relevance=row.relevance)
                dropped = Counter[str]()
                new = write(whole, dropped)
                report.written["questions"] += new
                report.joined["rows with the question of an earlier one"] += not new
                for name in LISTS[:1] if target is Target.beir else LISTS:
                    report.written[name.replace("_", " ")] += len(getattr(whole, name))
                report.dropped.update(dropped)
                report.margins &= all(passage.teacher == 0 for passage in whole.hard_negatives)
                for passages in lists:
                    if isinstance(passages, CorpusPassages):
                        named[passages.positions] = True
        if corpus:
            report.written["passages"] = corpus.count
    if target not in CORPORA:
        report.dropped["passages that no row names"] = int((~named).sum())


# ---- passages ------------------------------------------------------------------------------------------------------


def convert_passages(source: str, options: PackOptions) -> None:
    """Convert an input of passages alone to the corpus file of the format `options.to`, and print a report.

    The file is in the new folder `options.out`. source: paths or URLs. Raises ConfigError for a format without a corpus
    file, and for other options that cannot work. With on_error=stop a bad row raises DataError, and the folder is not
    made. With on_error=skip bad rows are left out; DataError is raised if no row remains.
    """
    out, target, unread = checked_new_folder(options.out), options.to, UnreadFields()
    if target not in CORPORA:
        raise ConfigError(f"INPUT {source} has passages only: to= must be one of {', '.join(t.name for t in CORPORA)}.")
    report = ConversionReport(target, Tally(options.on_error), unread)
    with new_folder(out) as folder:
        with written_ids(folder) as written, corpus_writer(folder, target, written, None, report.dropped) as corpus:
            for where, passage in open_passages(source, "INPUT", unread, options):
                with report.tally.row(where):
                    report.joined["passages with an equal one before them"] += not corpus.add([sound(passage)])
            report.written["passages"] = corpus.count
        report.tally.check_any(source)
        index_new(folder)
    report.print(out)
