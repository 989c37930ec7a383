"""The hamexam set: US amateur radio examinations, one right option and three written wrong ones for each question.

DPR JSON for training (train.json, dev.json, test.json: the wrong options are the hard negatives) and a BEIR folder over
all distinct options for evaluation. Not shipped: made on request from a Debian package (GPL-3+).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.recipes.beir import residue, write_beir
from data.recipes.packages import DebianPackage, fetch, unpack

HAMEXAM = DebianPackage("hamexam", "1.7.0-3", "3ec136089caf21374e66af249351d50e38567ec08fa3184e6558287791b488bb")
POOLS = ("T", "G", "E")  # technician, general, extra
HEAD = re.compile(r"(?P<id>(?P<group>[TGE]\d[A-Z])\d\d) \((?P<right>[A-D])\)")
FIGURE = re.compile(r"\bfigure [TGE]\d", re.IGNORECASE)  # asks about a drawing, which is no text
# Such an option says something about the others and nothing on its own: it is no passage. Where it is the right one,
# the three others are right.
EACH_OF_THEM = re.compile(r"all (of )?(these|the) choices are correct", re.IGNORECASE)
# Of SHA-1(group) mod 10; the others train. Any would do; these give 320 and 172 of 1,539 questions.
SPLIT_OF_RESIDUE = {0: "test", 1: "test", 4: "dev"}
SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class Exam:
    """One question. group: the section of the syllabus, "T5D"; right, wrong: options as they are printed."""

    id: str
    group: str
    text: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]

    @property
    def split(self) -> str:
        return SPLIT_OF_RESIDUE.get(residue(self.group), "train")


def build_hamexam(out: Path, scratch: Path) -> None:
    """Write the set into `out`; downloads go to `scratch`."""
    archives = fetch([HAMEXAM], scratch)
    write_hamexam(out, unpack(archives.values(), scratch / "unpacked"))


def write_hamexam(out: Path, root: Path) -> None:
    """Write DPR files, corpus, queries, judgements and NOTICE.md, given the folder with the package's files."""
    every = list(read_exams(root / "usr/share/hamexam"))
    exams = [exam for exam in every if not FIGURE.search(exam.text)]
    passages = number_options(exams)
    for split in SPLITS:
        rows = [dpr_row(exam, passages) for exam in exams if exam.split == split]
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        (out / f"{split}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    write_beir(
        out,
        ({"_id": name, "title": "", "text": text} for text, name in passages.items()),
        ({"_id": exam.id, "text": exam.text, "metadata": {"topic": exam.group}} for exam in exams),
        {s: [(e.id, passages[text], 1) for e in exams if e.split == s for text in e.right] for s in SPLITS},
    )
    (out / "NOTICE.md").write_text(notice(exams, len(every), len(passages)), encoding="utf-8")


def read_exams(folder: Path) -> Iterator[Exam]:
    """All questions, pool by pool. A file: id and letter of the right option, the question, options A to D."""
    for path in (path for pool in POOLS for path in sorted((folder / pool).iterdir())):
        yield parse_exam(path.read_text(encoding="utf-8"), str(path))


def parse_exam(text: str, where: str) -> Exam:
    """Raises DataError, naming `where`, when the text is no question with four options."""
    head, question, *options = [line.strip() for line in text.splitlines() if line.strip()] or [""] * 2
    printed = HEAD.match(head)
    if printed is None or [option[:3] for option in options] != ["A. ", "B. ", "C. ", "D. "]:
        raise DataError(f"build: {where}: not an id with its answer, a question and the options A. to D.")
    by_letter = {option[0]: option[3:].strip() for option in options}
    right = [by_letter.pop(printed["right"])]
    wrong = [option for option in by_letter.values() if not EACH_OF_THEM.fullmatch(option)]
    if EACH_OF_THEM.fullmatch(right[0]):
        right, wrong = wrong, []
    return Exam(printed["id"], printed["group"], question, tuple(dict.fromkeys(right)), tuple(dict.fromkeys(wrong)))


def number_options(exams: Iterable[Exam]) -> dict[str, str]:
    """option → passage id, numbered as they first appear; equal texts are one passage."""
    options = dict.fromkeys(option for exam in exams for option in (*exam.right, *exam.wrong))
    return {option: f"option{number:04d}" for number, option in enumerate(options)}


def dpr_row(exam: Exam, passages: dict[str, str]) -> dict[str, Any]:
    def contexts(options: Iterable[str]) -> list[dict[str, str]]:
        return [{"title": "", "text": option, "passage_id": passages[option]} for option in options]

    return {
        "query_id": exam.id,
        "question": exam.text,
        "answers": list(exam.right),
        "positive_ctxs": contexts(exam.right),
        "negative_ctxs": [],
        "hard_negative_ctxs": contexts(exam.wrong),
    }


def notice(exams: Sequence[Exam], read: int, passages: int) -> str:
    """NOTICE.md: whose work this is, how it was made, what to know before trusting a figure."""
    counts = Counter(exam.split for exam in exams)
    return NOTICE.format(
        package=HAMEXAM,
        counts=", ".join(f"{split} {counts[split]:,}" for split in SPLITS),
        figures=read - len(exams),
        passages=passages,
        several=sum(len(exam.right) > 1 for exam in exams),
    )


NOTICE = """\
# Hamexam: questions with one right and three written wrong options

Made by `python -m data build hamexam` from the Debian package {package.pin}, SHA-256
`{package.sha256}`: hamexam by John Nogatch, GPL-3+. The question
pools are those of the US National Conference of Volunteer Examiner Coordinators, <https://www.ncvec.org>.

`train.json`, `dev.json`, `test.json`: DPR's format; the wrong options are `hard_negative_ctxs`. `corpus.jsonl`,
`queries.jsonl`, `qrels/*.tsv`: the same as a BEIR folder over all {passages:,} distinct options.

Questions: {counts}.

- A passage is the text of an option alone; equal texts are one passage. Many are short ("4", "Resistor") and fit many
  questions: by judgements an option counts only where it was printed as right, and DPR's `has_answer` finds short
  answers in many passages. Trust the judgements, and compare systems rather than reading a figure by itself.
- "All of these choices are correct" is no passage. Where it is right ({several} questions), the other options are the
  right passages and there is no hard negative; where it is wrong, there is one hard negative less.
- Left out: {figures} questions about a drawing.
- Splits by section of the syllabus: SHA-1("T5D") mod 10 is 0 or 1 for test, 4 for dev, else train. The three pools
  overlap in subject, and some options of test questions are printed in train questions too.
"""
