"""Hard negatives mined anew while training (ANCE: Xiong et al. 2021, arXiv 2007.00808).

Steps are cut into segments of data.negatives.refresh_every = R. Before the first step of a segment the corpus is
encoded with the weights as they are and searched, and all steps of the segment draw from what is found. Segment 0 has
data.negatives.file where that is given; else it is mined like the others, with the starting weights.

    <run>/negatives/step_00000080/ mined.jsonl, mined.json      80: the first step of its segment

A run that goes on inside a segment reads the segment's file; one that goes on at its first step mines, and equal
weights give equal negatives: either way the losses are those of an undisturbed run. With R a multiple of
checkpoint.every, a run that is killed while it encodes takes up what it has encoded. What no kept checkpoint needs is
deleted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from data.batch import Batch
from data.corpus import Corpus
from data.errors import DataError
from data.files import remove, writable
from data.negatives import MinedNegatives
from data.question_passage import QuestionPassage
from data.storage import sha256_of
from eval.encode import Encoder
from eval.mining import MINED, SUMMARY, embedded, mine
from train.distributed.agreement import rank_0_first, rank_0_only
from train.distributed.world import World
from train.runs import checkpoint

FOLDER, EMBEDDINGS = "negatives", "embeddings"
BLOCK = 256  # texts encoded at a time: eval.block may be another after a restart, and would change the last bits

Load = Callable[[QuestionPassage, int, int], Iterable[Batch]]  # (dataset, first step, last step) → their batches


@dataclass(frozen=True)
class Refresh:
    """A run's negatives, segment by segment. All methods are collectives.

    dataset: makes batches, with the negatives of data.negatives.file where there are some. encode: with the towers in
    training. run: its folder. resumed: the checkpoint it goes on from, maybe another run's. say: where lines go.
    """

    dataset: QuestionPassage
    encode: Encoder
    run: Path
    resumed: Path | None
    say: Callable[[str], None]

    def batches(self, first_step: int, last_step: int, load: Load) -> Iterator[Batch]:
        """One batch per step; the loader of a segment starts, and mining with it, when its first batch is asked for."""
        step = first_step
        while step < last_step:
            begin = step - step % self._every
            end = min(begin + self._every, last_step)
            yield from load(self._with(self.negatives(begin, step)), step, end)
            step = end

    def negatives(self, begin: int, step: int) -> MinedNegatives | None:
        """What the steps from `step` on draw from, in the segment that begins at `begin`.

        Mined when step = begin, which leaves the towers as they were; else read. Raises DataError when the file is
        missing or not as it was written.
        """
        if begin == 0 and self.dataset.mined is not None:
            return self.dataset.mined
        folder = self.run / FOLDER / f"step_{begin:08d}"
        if step == begin:
            self._mine(folder, begin)
        else:
            rank_0_only(self._world, lambda: self._find(folder, begin, step))
        questions, corpus = self.dataset.questions, self._corpus
        return rank_0_first(self._world, lambda: MinedNegatives.open(str(folder / MINED), questions, corpus))

    @property
    def _every(self) -> int:
        return self.dataset.config.negatives.refresh_every

    @property
    def _world(self) -> World:
        return self.encode.world

    @property
    def _corpus(self) -> Corpus:
        corpus = self.dataset.questions.corpus
        assert corpus is not None, "the dataset refuses refresh_every without a corpus"
        return corpus

    def _with(self, mined: MinedNegatives | None) -> QuestionPassage:
        old = self.dataset
        return QuestionPassage(old.questions, old.tokenize, old.config, old.seed, mined)

    def _mine(self, folder: Path, step: int) -> None:
        start, data, encode = perf_counter(), self.dataset, replace(self.encode, block=BLOCK)
        kept = self.run / FOLDER / EMBEDDINGS
        source = embedded(encode, data.questions, self._corpus, data.tokenize, data.config, kept, self.say)
        summary = mine(source, data.config.negatives.mining, folder, self._world, {"step": step})
        rank_0_only(self._world, lambda: self._tidy(step))
        self.say(
            f"Mined at step {step}: {summary['negatives']:,} negatives for {summary['questions']:,} questions, "
            f"{summary['without']:,} have none ({perf_counter() - start:.0f} s)"
        )

    def _tidy(self, step: int) -> None:
        """Keep what kept checkpoints may need, and no embeddings. What cannot be deleted is no reason to stop."""
        remove(self.run / FOLDER / EMBEDDINGS)
        oldest = min([step, *checkpoint.steps(self.run)])
        for folder in (self.run / FOLDER).glob("step_*"):
            number = folder.name.removeprefix("step_")
            if number.isdecimal() and int(number) < oldest - oldest % self._every:
                remove(folder)

    def _find(self, folder: Path, begin: int, step: int) -> None:
        """Make sure that the file of a segment is there, as it was written. Rank 0 alone."""
        if self.resumed is not None:
            theirs = self.resumed.resolve().parent.parent / FOLDER / folder.name
            if theirs.is_dir() and theirs != folder.resolve():
                _copy(theirs, folder)
        problem = _problem(folder)
        if problem:
            borders = [s for s in checkpoint.steps(self.run) if s % self._every == 0 and s < step]
            earlier = f"resume={self.run / 'checkpoints' / f'step_{borders[0]:08d}'} or " if borders else ""
            raise DataError(
                f"{folder / MINED} {problem}: steps {begin} to {begin + self._every - 1} draw from it, and the run "
                f"goes on at step {step}. Put it back, or go on where it is mined anyway: {earlier}resume=never"
            )


def _problem(folder: Path) -> str:
    """What is wrong with a mined file, "" when nothing is."""
    try:
        expected = json.loads((folder / SUMMARY).read_bytes())["sha256"]
        return "" if sha256_of(folder / MINED) == expected else f"has changed since it was mined ({SUMMARY}: SHA-256)"
    except FileNotFoundError as error:
        return "is missing" if Path(error.filename).name == MINED else f"has lost its {SUMMARY}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"cannot be read ({error})"


def _copy(source: Path, target: Path) -> None:
    with writable(target):
        target.mkdir(parents=True, exist_ok=True)
        for name in (MINED, SUMMARY):
            if (source / name).is_file():
                shutil.copyfile(source / name, target / name)
