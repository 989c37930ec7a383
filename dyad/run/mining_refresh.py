"""Hard negatives that are mined again during training (ANCE: Xiong et al. 2021, arXiv 2007.00808).

Training is divided into segments of R = data.negatives.refresh_every steps. Before the first step of a segment, the
corpus is encoded with the current weights and searched; all steps of the segment draw their negatives from the result.
Segment 0 uses data.negatives.file if that is given; otherwise it is mined too, with the starting weights.

    <run>/negatives/step_00000080/ mined.jsonl, mined.json      80: the first step of its segment

A run that resumes inside a segment reads the segment's file. A run that resumes at the first step of a segment mines
again, and equal weights give equal negatives. So the losses are those of an uninterrupted run. When R is a multiple of
checkpoint.every, a run that is killed during encoding continues with the embeddings that are finished. Files that no
checkpoint of the run needs are deleted.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from dyad.data.base.errors import DataError
from dyad.data.base.files import file_inside, remove, write_errors
from dyad.data.base.json_text import read_json
from dyad.data.batch import Batch
from dyad.data.question_passage.dataset import QuestionPassage
from dyad.data.question_passage.negatives import MinedNegatives
from dyad.data.shards.storage import sha256_of
from dyad.eval.encode.encoder import Encoder
from dyad.eval.mine.mining import MINED, SUMMARY, embed_all, mine
from dyad.eval.mine.passages import QuestionsAndPassages
from dyad.train.distributed.agreement import rank_0_first, rank_0_only
from dyad.train.run_folder.folder import folder_of, steps

FOLDER, EMBEDDINGS = "negatives", "embeddings"
BLOCK = 256  # texts encoded at a time. Not eval.block, which may change at a restart, and with it the last bits

Load = Callable[..., Iterable[Batch]]  # (dataset, first_step=…, last_step=…) → their batches


@dataclass(frozen=True)
class NegativeRefresh:
    """Provides the mined hard negatives of a run, which are mined again for each segment (see the module docstring).

    Every rank must call all public methods. dataset: the training data; its `mined` holds the negatives of
    data.negatives.file, None without that key. encode: the encoder with the trained towers. run: the run folder.
    resumed: the checkpoint folder that the run resumed from, which may be of another run; None for a new run. log:
    called with each line to print.
    """

    dataset: QuestionPassage
    encode: Encoder
    run: Path
    resumed: Path | None
    log: Callable[[str], None]

    def batches(self, first_step: int, last_step: int, load: Load) -> Iterator[Batch]:
        """Yield one batch for each step first_step … last_step - 1, with hard negatives mined anew for each segment.

        A segment is data.negatives.refresh_every steps. When its first batch is asked for, `negatives` mines or reads
        its hard negatives, and `load` is called. load: the function (dataset, first_step=…, last_step=…) → batches,
        which starts a data loader.
        """
        old, step = self.dataset, first_step
        while step < last_step:
            begin = step - step % self._every
            end = min(begin + self._every, last_step)
            dataset = QuestionPassage(old.questions, old.tokenize, old.config, old.seed, self.negatives(begin, step))
            yield from load(dataset, first_step=step, last_step=end)
            step = end

    def negatives(self, begin: int, step: int) -> MinedNegatives | None:
        """Return the mined hard negatives of the segment (a part of the training steps) that begins at step `begin`.

        step: the first step that will use the negatives. If step = begin, they are mined with the current weights and
        written to the segment's file; otherwise, they are read from that file. Segment 0 uses data.negatives.file
        instead, if that is given. Every rank must call it. Raises DataError, on all ranks, when the segment's file is
        missing or has changed.
        """
        if begin == 0 and self.dataset.mined is not None:
            return self.dataset.mined
        folder = self.run / FOLDER / f"step_{begin:08d}"
        if step == begin:
            self._mine(folder, begin)
        else:
            rank_0_only(self.encode.world, lambda: self._check_file(folder, begin, step))
        path, questions = str(folder / MINED), self.dataset.questions
        return rank_0_first(self.encode.world, lambda: MinedNegatives(path, questions))

    @property
    def _every(self) -> int:
        return self.dataset.config.negatives.refresh_every

    def _mine(self, folder: Path, step: int) -> None:
        """Mine hard negatives with the current weights into `folder`, then delete files that are needed no more.

        step: the first step of the segment. Every rank must call it.
        """
        start, data, encode = perf_counter(), self.dataset, replace(self.encode, block=BLOCK)
        corpus, done = data.questions.corpus, self.run / FOLDER / EMBEDDINGS
        assert corpus is not None, "the dataset refuses refresh_every without a corpus"
        with encode.weights():
            pairs = QuestionsAndPassages(data.questions, corpus, data.tokenize, data.config)
            source = embed_all(encode, pairs, done, self.log)
            summary = mine(source, data.config.negatives.mining, folder, encode.world, {"step": step})
        rank_0_only(encode.world, lambda: self._tidy(step))
        self.log(
            f"Mined at step {step}: {summary['negatives']:,} negatives for {summary['questions']:,} questions, "
            f"{summary['without']:,} have none ({perf_counter() - start:.0f} s)"
        )

    def _tidy(self, step: int) -> None:
        """Delete the embeddings of the corpus, and the mined files of segments that no checkpoint needs any more.

        A segment is a part of the training steps with the same hard negatives. step: the current step, the first of
        its segment. Errors of the file system are ignored.
        """
        remove(self.run / FOLDER / EMBEDDINGS)
        oldest = min([step, *steps(self.run)])
        for folder in (self.run / FOLDER).glob("step_*"):
            number = folder.name.removeprefix("step_")
            if number.isdecimal() and int(number) < oldest - oldest % self._every:
                remove(folder)

    def _check_file(self, folder: Path, begin: int, step: int) -> None:
        """Raise DataError unless the file of mined hard negatives in `folder` exists and is unchanged.

        Rank 0 alone calls it. If the run resumed from a checkpoint of another run, the segment's files of that run are
        first copied to `folder`. begin: the first step of the segment (a part of the training steps). step: the step at
        which the run resumes. Raises HardwareError if the copies cannot be written.
        """
        if self.resumed is not None:  # the checkpoint may be of another run, whose files this run takes over
            theirs = self.resumed.resolve().parent.parent / FOLDER / folder.name
            if theirs.is_dir() and theirs != folder.resolve():
                with write_errors(folder):
                    folder.mkdir(parents=True, exist_ok=True)
                    for name in (MINED, SUMMARY):  # nothing else: another user may have made that folder
                        if source := file_inside(theirs, name):
                            shutil.copyfile(source, folder / name)
        if problem := _problem(folder):
            borders = [s for s in steps(self.run) if s % self._every == 0 and s < step]
            earlier = f"resume={folder_of(self.run, borders[0])} or " if borders else ""
            raise DataError(
                f"{folder / MINED} {problem}: steps {begin} to {begin + self._every - 1} draw from it, and the run "
                f"goes on at step {step}. Put it back, or go on where it is mined anyway: {earlier}resume=never"
            )


def _problem(folder: Path) -> str:
    """Describe why the file of mined negatives in `folder` cannot be used; "" if it can."""
    try:
        expected = read_json(folder / SUMMARY)["sha256"]
        return "" if sha256_of(folder / MINED) == expected else f"has changed since it was mined ({SUMMARY}: SHA-256)"
    except FileNotFoundError as error:
        return "is missing" if Path(error.filename).name == MINED else f"has lost its {SUMMARY}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"cannot be read ({error})"
