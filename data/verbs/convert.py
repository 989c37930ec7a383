"""`python -m data pack` for questions and passages: from any format into any other, and what that one cannot hold."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.corpus import CorpusPassages, PassageList
from data.errors import BadRow, ConfigError
from data.index import index_shards
from data.passages import InlinePassages, Passage
from data.questions import LISTS, QuestionRow
from data.rows import SUFFIXES
from data.verbs.inputs import Questions, open_input, open_passages, unread_fields
from data.verbs.options import PackOptions, Target
from data.verbs.outputs import Tally, checked_out, command, new_folder, shard_names
from data.verbs.writers import CORPORA, ROWS, CorpusWriter, corpus_writer

BY_ID = (Target.tevatron_ids, Target.beir)  # their rows name passages of a corpus
NEEDS_IDS = (Target.tevatron, *BY_ID)
BATCH = 64  # of experiment=mnrl
MADE = ("question ids", "passage ids")
Count = Callable[[QuestionRow], int]


# ---- what is lost --------------------------------------------------------------------------------------------------


def _passages(row: QuestionRow) -> Iterator[Passage]:
    for name in LISTS:
        yield from getattr(row, name)


_GROUPS: dict[str, Count] = {"question groups": lambda row: row.question.group is not None}
_ANSWERS: dict[str, Count] = {"answers": lambda row: len(row.question.answers)}
_ONE_LIST: dict[str, Count] = {"marks that a negative is a plain one": lambda row: len(row.negatives)}
LOST: dict[Target, dict[str, Count]] = {
    Target.shards: {},
    Target.dpr: {},
    Target.tevatron: _GROUPS | _ONE_LIST,
    Target.tevatron_ids: _GROUPS | _ONE_LIST,
    Target.flag: {
        "question ids": lambda row: bool(row.question.id),
        **_ANSWERS,
        **_GROUPS,
        "titles": lambda row: sum(bool(passage.title) for passage in _passages(row)),
        "passage ids": lambda row: sum(passage.id is not None for passage in _passages(row)),
        **_ONE_LIST,
    },
    Target.beir: {
        **_ANSWERS,
        "negatives": lambda row: len(row.negatives),
        "hard negatives": lambda row: len(row.hard_negatives),
    },
}


@dataclass
class Report:
    """What became of the rows. named: which passages of its corpus the source names; made: keys of what got an id."""

    target: Target
    tally: Tally
    unread: Counter[str]
    named: np.ndarray
    written: Counter[str] = field(default_factory=Counter)
    made: dict[str, array[int]] = field(default_factory=lambda: {name: array("q") for name in MADE})
    lost: Counter[str] = field(default_factory=Counter)
    joined: Counter[str] = field(default_factory=Counter)

    def count(self, row: QuestionRow) -> None:
        for name in LISTS[:1] if self.target is Target.beir else LISTS:
            self.written[name.replace("_", " ")] += len(getattr(row, name))
        if self.target in NEEDS_IDS:
            self.made["question ids"].extend([] if row.question.id else [row.question.key])
            self.made["passage ids"].extend(passage.key for passage in _passages(row) if passage.id is None)
        for what, lost in LOST[self.target].items():
            self.lost[what] += lost(row)

    def mark(self, row: QuestionRow) -> None:
        for passages in (getattr(row, name) for name in LISTS):
            if isinstance(passages, CorpusPassages):
                self.named[passages.positions] = True

    def lines(self, out: Path) -> list[str]:
        """What is printed."""
        name = self.target.name
        made = Counter({what: len(np.unique(np.array(keys))) for what, keys in self.made.items()})
        lines = [f"{_counts(self.written)} in {out} ({name}), indexed"]
        lines += [str(self.tally)] if self.tally.skipped else []
        lines += [f"made, since {name} needs them: {_counts(made)}"] if +made else []
        lines += [f"joined, since {name} has each once: {_counts(self.joined)}"] if +self.joined else []
        lines += [f"dropped, since {name} cannot hold them: {_counts(self.lost)}"] if +self.lost else []
        lines += [f"not read: {unread_fields(self.unread)}"] if +self.unread else []
        return lines


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counter.items() if count)


# ---- questions -----------------------------------------------------------------------------------------------------


def convert(source: str, options: PackOptions) -> None:
    """Write the questions of an input into the new folder `options.out` as `options.to`; print what became of them.

    Raises ConfigError for what cannot work, DataError naming file and line for a bad row (`on_error=stop`). Nothing is
    left behind in either case. With on_error=skip a corpus may have passages of rows that are left out.
    """
    out, target = checked_out(options), options.to
    questions = open_input(source, options, "INPUT")
    named = np.zeros(len(questions.corpus or ()), bool)
    report = Report(target, Tally(options.on_error), questions.unread, named)
    with new_folder(out) as folder:
        _write(questions, folder, options, report)
        report.tally.refuse_nothing(source)
        files = _index(folder)
    if questions.corpus and target not in CORPORA:
        report.lost["passages that no row names"] = int((~report.named).sum())
    print("\n".join([*report.lines(out), "train on them:", f"  {_train_command(out, options, files, report.written)}"]))


def _write(questions: Questions, folder: Path, options: PackOptions, report: Report) -> None:
    target, tally = options.to, report.tally
    with _corpus(questions, folder, target) as corpus, ROWS[target](folder, options) as write:
        if corpus:
            corpus.copy(questions.passages())
        for where, row in questions.rows():
            tally.rows += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                if corpus and target in BY_ID:
                    corpus.add(passage for passages in _inline(row) for passage in passages)
                whole = QuestionRow(row.question, *(InlinePassages([*getattr(row, name)]) for name in LISTS))
                own = write(whole)
            except BadRow as bad:
                tally.leave_out(f"{where}: {bad}", bad.reason)
                continue
            report.written["questions"] += own
            report.joined["rows with the question of an earlier one"] += not own
            report.count(whole)
            report.mark(row)
        if corpus:
            report.written["passages"] = corpus.count
            report.lost += corpus.lost


def _corpus(questions: Questions, folder: Path, target: Target) -> AbstractContextManager[CorpusWriter | None]:
    """A file of passages where the format needs one, or the source has one and the format can."""
    if target in BY_ID or (questions.corpus and target in CORPORA):
        return corpus_writer(folder, target, questions.corpus)
    return nullcontext()


def _inline(row: QuestionRow) -> list[PassageList]:
    """The lists that are not chosen from the source's corpus."""
    return [passages for name in LISTS if not isinstance(passages := getattr(row, name), CorpusPassages)]


def _index(folder: Path) -> int:
    """Read all that was written once more, as training will; returns the number of files."""
    files = sorted(str(file) for file in folder.iterdir() if file.suffix in SUFFIXES)
    indexes = list(index_shards(files))
    assert not any(index.problems for index in indexes), indexes
    return len(files)


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
    batch = [f"global_batch_size={written['questions']}"] if written["questions"] < BATCH else []
    return command("python -m train experiment=mnrl model.text.name=bert-base-uncased", paths, *split, *batch)


# ---- passages ------------------------------------------------------------------------------------------------------


def convert_passages(source: str, options: PackOptions) -> None:
    """Write the passages of an input, which has no questions, as the corpus of `options.to`. Raises as `convert`."""
    out, target = checked_out(options), options.to
    if target not in CORPORA:
        raise ConfigError(f"INPUT {source} has passages only: to= must be one of {', '.join(t.name for t in CORPORA)}.")
    report = Report(target, Tally(options.on_error), Counter(), np.zeros(0, bool))
    with new_folder(out) as folder:
        with corpus_writer(folder, target, None) as corpus:
            for where, passage in open_passages(source, "INPUT", report.unread):
                report.tally.rows += 1
                try:
                    if isinstance(passage, BadRow):
                        raise passage
                    own = corpus.add([passage])
                except BadRow as bad:
                    report.tally.leave_out(f"{where}: {bad}", bad.reason)
                    continue
                report.made["passage ids"].extend([passage.key] if passage.id is None else [])
                report.joined["passages with an equal one before them"] += not own
            report.written["passages"] = corpus.count
            report.lost += corpus.lost
        report.tally.refuse_nothing(source)
        _index(folder)
    print("\n".join(report.lines(out)))
