"""`python -m data pack` for questions and passages: writes any format as any other, and reports what is lost."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dyad.data.base.errors import BadRow, ConfigError
from dyad.data.cli.inputs import InputQuestions, open_input, open_passages, unread_fields
from dyad.data.cli.options import PackOptions, Target
from dyad.data.cli.outputs import Tally, checked_out, command, index_new, new_folder, shard_names
from dyad.data.cli.writers import CORPORA, ROWS, CorpusWriter, corpus_writer
from dyad.data.question_passage.corpus import CorpusPassages
from dyad.data.question_passage.passages import InlinePassages
from dyad.data.question_passage.questions import LISTS, QuestionRow
from dyad.data.shards.rows import SUFFIXES

BY_ID = (Target.tevatron_ids, Target.beir)  # formats whose rows name passages of a corpus
NEEDS_IDS = (Target.tevatron, *BY_ID)
MNRL_BATCH = 64  # global_batch_size of experiment=mnrl
MADE = ("question ids", "passage ids")


@dataclass
class ConversionReport:
    """What became of the rows, by name. made: content keys of what got an id. dropped: what the format cannot hold."""

    target: Target
    tally: Tally
    unread: Counter[str]
    written: Counter[str] = field(default_factory=Counter)
    made: dict[str, array[int]] = field(default_factory=lambda: {name: array("q") for name in MADE})
    joined: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def count(self, row: QuestionRow) -> None:
        """Count a row that was written."""
        for name in LISTS[:1] if self.target is Target.beir else LISTS:
            self.written[name.replace("_", " ")] += len(getattr(row, name))
        if self.target in NEEDS_IDS:
            self.made["question ids"].extend([] if row.question.id else [row.question.key])
            passages = [*row.positives, *row.negatives, *row.hard_negatives]
            self.made["passage ids"].extend(passage.key for passage in passages if passage.id is None)

    def lines(self, out: Path) -> list[str]:
        """The lines that are printed."""
        name = self.target.name
        counts = {
            f"made, since {name} needs them": {
                what: len(np.unique(np.array(keys))) for what, keys in self.made.items()
            },
            f"joined, since {name} has each once": self.joined,
            f"dropped, since {name} cannot hold them": self.dropped,
        }
        lines = [f"{_counts(self.written)} in {out} ({name}), indexed"]
        lines += [str(self.tally)] if self.tally.skipped else []
        lines += [f"{what}: {_counts(counter)}" for what, counter in counts.items() if any(counter.values())]
        lines += [f"not read: {unread_fields(self.unread)}"] if +self.unread else []
        return lines


def _counts(counter: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counter.items() if count)


# ---- questions -----------------------------------------------------------------------------------------------------


def convert(source: str, options: PackOptions) -> None:
    """Write the questions of an input into the new folder `options.out` as `options.to`; print what became of them.

    Raises ConfigError for what cannot work, DataError naming file and line for a bad row (`on_error=stop`); then the
    folder is not made. With on_error=skip the corpus may hold passages of rows that were skipped.
    """
    out, target = checked_out(options), options.to
    questions = open_input(source, options, "INPUT")
    report = ConversionReport(target, Tally(options.on_error), questions.unread)
    with new_folder(out) as folder:
        named = _write(questions, folder, options, report)
        report.tally.check_any(source)
        files = len(index_new(file for file in folder.iterdir() if file.suffix in SUFFIXES))
    if target not in CORPORA:
        report.dropped["passages that no row names"] = int((~named).sum())
    print("\n".join([*report.lines(out), "train on them:", f"  {_train_command(out, options, files, report.written)}"]))


def _write(questions: InputQuestions, folder: Path, options: PackOptions, report: ConversionReport) -> np.ndarray:
    """Write all files. Returns, for each passage of the source's corpus, whether a row names it."""
    target, tally = options.to, report.tally
    named = np.zeros(len(questions.corpus or ()), bool)
    with _corpus(questions, folder, target) as corpus, ROWS[target](folder, options) as write:
        if corpus:
            corpus.copy(questions.passages())
        for where, row in questions.rows():
            with tally.row(where):
                if isinstance(row, BadRow):
                    raise row
                lists = [getattr(row, name) for name in LISTS]
                if corpus and target in BY_ID:
                    corpus.add(p for passages in lists if not isinstance(passages, CorpusPassages) for p in passages)
                whole = QuestionRow(row.question, *(InlinePassages([*passages]) for passages in lists))  # read once
                dropped = Counter[str]()
                new = write(whole, dropped)
                report.written["questions"] += new
                report.joined["rows with the question of an earlier one"] += not new
                report.count(whole)
                report.dropped.update(dropped)
                for passages in lists:
                    if isinstance(passages, CorpusPassages):
                        named[passages.positions] = True
        if corpus:
            report.written["passages"] = corpus.count
            report.dropped.update(corpus.dropped)
    return named


def _corpus(questions: InputQuestions, folder: Path, target: Target) -> AbstractContextManager[CorpusWriter | None]:
    """A file of passages where the format needs one, or where the source has one and the format allows it."""
    if target in BY_ID or (questions.corpus and target in CORPORA):
        return corpus_writer(folder, target, questions.corpus)
    return nullcontext()


def _train_command(out: Path, options: PackOptions, files: int, written: Counter[str]) -> str:
    train = {
        Target.shards: shard_names(out, files),
        Target.dpr: out / f"{options.split}.json",
        Target.beir: out,
    }.get(options.to, out / f"{options.split}.jsonl")
    paths = {"data.train": train}
    if options.to is Target.tevatron_ids:
        paths["data.passage.corpus"] = out / CORPORA[options.to].name
    split = [f"data.question.split={options.split}"] if options.to is Target.beir and options.split != "train" else []
    batch = [f"global_batch_size={written['questions']}"] if written["questions"] < MNRL_BATCH else []
    return command("python -m train experiment=mnrl model.text.name=bert-base-uncased", paths, *split, *batch)


# ---- passages ------------------------------------------------------------------------------------------------------


def convert_passages(source: str, options: PackOptions) -> None:
    """Write the passages of an input, which has no questions, as the corpus of `options.to`. Raises as `convert`."""
    out, target = checked_out(options), options.to
    if target not in CORPORA:
        raise ConfigError(f"INPUT {source} has passages only: to= must be one of {', '.join(t.name for t in CORPORA)}.")
    report = ConversionReport(target, Tally(options.on_error), Counter())
    with new_folder(out) as folder:
        with corpus_writer(folder, target, None) as corpus:
            for where, passage in open_passages(source, "INPUT", report.unread):
                with report.tally.row(where):
                    if isinstance(passage, BadRow):
                        raise passage
                    new = corpus.add([passage])
                    report.made["passage ids"].extend([passage.key] if passage.id is None else [])
                    report.joined["passages with an equal one before them"] += not new
            report.written["passages"] = corpus.count
            report.dropped.update(corpus.dropped)
        report.tally.check_any(source)
        index_new(file for file in folder.iterdir() if file.suffix in SUFFIXES)
    print("\n".join(report.lines(out)))
