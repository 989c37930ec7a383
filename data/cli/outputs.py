"""Helpers of the verbs of `python -m data` that write data: new folders and files, shards, counts of skipped rows,
commands to print."""

import glob
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from dyad.data.base.errors import BadFormat, BadRow, ConfigError, DataError
from dyad.data.base.files import remove_dead, setting_errors, whole_folder
from dyad.data.base.progress import print_line
from dyad.data.cli.options import ImageTask, OnError, ReadOptions, WriteOptions
from dyad.data.config import CaptionPer, DataConfig
from dyad.data.shards.index import ShardIndex, index_shards
from dyad.data.shards.rows import SUFFIXES

SHOWN = 5  # number of bad rows whose messages are printed
GPU = "/dev/nvidiactl"  # exists on a machine with a GPU; asking torch takes seconds
SMALL = "configs/model/tiny_clip_gn.json"  # file of the preset model=tiny_clip_gn, in a checkout of the repository
MNRL_BATCH, CLIP_BATCH = 64, 256  # global_batch_size of experiment=mnrl and sts, and the default
TRAINS = {  # arguments of a command that trains on images, without its model
    ImageTask.image_text: [],
    ImageTask.views: ["task=views", "data=simclr", "objective=simclr", "model.head=simclr"],
    ImageTask.labelled: ["task=labelled", "objective=cross_entropy_sum"],
}
SMALL_MODELS = {ImageTask.image_text: "model=tiny_clip_gn"}
SMALL_MODELS |= dict.fromkeys((ImageTask.views, ImageTask.labelled), "model=small_cnn")

AddSample = Callable[[Mapping[str, Any]], object]  # writes a sample {suffix: bytes}
Paths = Mapping[str, str | int | Path]  # configuration key of a run, such as data.train → its value


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Context manager that yields a new empty folder to fill, and renames it to `out` when the block ends.

    When the block raises, the folder is deleted. Folders that killed processes left beside `out` are deleted first
    (`remove_dead`). `out` must be missing or an empty folder. Raises ConfigError when the folder cannot be written, and
    in place of an OSError of the block.
    """
    with setting_errors(f"out={out}"):
        beside = out.resolve().parent / f".{out.name}.{os.getpid()}.partial"  # other processes may write `out` too
        remove_dead(beside.parent, f".{glob.escape(out.name)}.*.partial")
        with whole_folder(out, beside) as folder:
            yield folder


def checked_new_folder(folder: str | None) -> Path:
    """Return the path of the folder that a verb will write, the option `out`, with ~ expanded. Nothing is made.

    Raises ConfigError if the option is missing, or if the path exists and is not an empty folder.
    """
    if not folder:
        raise ConfigError("out=FOLDER is missing, for example out=shards.")
    out = Path(folder).expanduser()
    if os.path.exists(out) and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out={out} is there already; choose a new folder or delete it.")
    return out


def checked_new_file(out: str | None, suffixes: Sequence[str]) -> Path:
    """Return the path of the file that a verb will write, the option `out`, with ~ expanded. Nothing is made.

    Raises ConfigError if the option is missing, the file exists, or it has a suffix that is not in `suffixes`.
    """
    if not out or Path(out).suffix not in suffixes:
        raise ConfigError(f"out={out or ''}: needs the name of a new file, {' or '.join(suffixes)}")
    if os.path.exists(path := Path(out).expanduser()):
        raise ConfigError(f"out={out} is there already; choose a new file or delete it.")
    return path


@contextmanager
def shard_writer(folder: Path, options: WriteOptions) -> Iterator[AddSample]:
    """Context manager that yields a function to add one sample to new shards in `folder`: 000000.tar, 000001.tar, ….

    The function takes a sample as {suffix: bytes}; the entry "__key__" is the sample's name, by default its number. A
    new shard begins after options.maxcount samples or options.maxsize bytes. Equal samples always give equal bytes of
    shards. Without a sample at most one shard is written, an empty one.
    """
    from webdataset.writer import ShardWriter

    pattern = str(folder).replace("%", "%%") + "/%06d.tar"
    limits, numbers = {"maxcount": options.maxcount, "maxsize": options.maxsize}, count()
    with ShardWriter(pattern, **limits, mtime=0, encoder=False, verbose=0) as writer:
        yield lambda sample: writer.write({"__key__": f"{next(numbers):09d}", **sample})


def index_new(folder: Path) -> list[ShardIndex]:
    """Index all data files directly in a newly written folder, and return the index of each, sorted by path.

    The indexes are stored as for training. A problem in a file is a fault of the writer: AssertionError.
    """
    indexes = list(index_shards(sorted(str(file) for file in folder.iterdir() if file.suffix in SUFFIXES)))
    assert not any(index.problems for index in indexes), indexes
    return indexes


def file_names(indexes: Sequence[ShardIndex]) -> Path:
    """Return one relative path that names all newly written files of rows, such as "{000000..000011}.tar".

    If there is only one file, its name is returned; several must be tar shards. indexes: of all files of the folder; a
    corpus is left out.
    """
    names = [index.name for index in indexes if not index.name.startswith("corpus.")]
    return Path(names[0] if len(names) == 1 else f"{{000000..{len(names) - 1:06d}}}.tar")


def image_command(paths: Paths, samples: int, options: ReadOptions, captions: str = "txt") -> str:
    """Return a shell command that trains on images for options.task.

    The model is a small one if this machine has no GPU and the working folder is a checkout of the repository, else
    ViT-B-32. paths: configuration keys and values of the data. samples: number of training samples, which limits the
    batch size. captions: where captions are, "txt" or a json field; used for the task image_text alone.
    """
    small = not os.path.exists(GPU) and os.path.exists(SMALL)  # a ViT takes a second an image on a core
    words = [*TRAINS[options.task], SMALL_MODELS[options.task] if small else "model.name=ViT-B-32"]
    if options.task is ImageTask.image_text and captions != "txt":
        words = [f"data.captions=[{captions}]", *words]
    elif options.task is ImageTask.image_text and options.caption_per is not CaptionPer.paragraph:
        words = [f"data.caption_per={options.caption_per.value}", *words]
    elif options.task is ImageTask.labelled and options.label != DataConfig.label:
        words.append(f"data.label={options.label}")
    return command("python -m train", paths, *words, "epochs=10", f"global_batch_size={min(samples, CLIP_BATCH)}")


def question_command(paths: Paths, questions: int, *others: str, negatives: bool = True, margins: bool = False) -> str:
    """Return a shell command that trains on questions and passages.

    paths: configuration keys and values of the data; data.teacher chooses an objective for scores. questions: number of
    training questions, which limits the batch size. others: further arguments. negatives: whether rows have negatives.
    margins: whether data.teacher gives only differences of two scores.
    """
    scored = "data.teacher" in paths
    recipe = "sts" if scored and not negatives else "mnrl"
    by_list = ["objective=distill_kl", "objective.similarity=cosine", "objective.temperature=0.05"]
    learns = ["objective=margin_mse", "objective.similarity=dot"] if margins else by_list
    objective = learns if scored and negatives else []
    batch = [f"global_batch_size={questions}"] if questions < MNRL_BATCH else []
    words = f"python -m train experiment={recipe} model.text.name=bert-base-uncased"
    return command(words, paths, *objective, *others, *batch)


def command(program: str, paths: Paths, *others: str) -> str:
    """Return a command line to print: the program, key="path" for each of `paths`, then the other arguments.

    Paths are quoted for the shell and Hydra, the others for the shell alone.
    """
    escaped = {key: str(path).replace("\\", "\\\\").replace('"', '\\"') for key, path in paths.items()}
    arguments = [*(f'{key}="{value}"' for key, value in escaped.items()), *others]
    return " ".join([program, *map(shlex.quote, arguments)])


@dataclass
class Tally:
    """Counts of the rows of an input: how many were read, and how many were skipped, by reason.

    on_error: stop (a bad row raises DataError) or skip (a bad row is left out and counted). str() gives the skipped
    rows by reason.
    """

    on_error: OnError
    rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def row(self, where: str) -> Iterator[None]:
        """Context manager that counts one row of an input, which the with block processes. where: location of the row,
        for messages.

        If the block raises a BadRow, the error is caught and given to `bad`.
        """
        self.rows += 1
        try:
            yield
        except BadRow as bad:
            self.bad(where, bad)

    def bad(self, where: str, bad: BadRow) -> None:
        """Count a row as skipped; print the message for the first SHOWN such rows. With on_error=stop raise DataError
        instead. where: location of the row."""
        message = f"{f'{where}: {bad}':.1000}"
        if self.on_error is OnError.stop:
            all_alike = self.rows == 1 and isinstance(bad, BadFormat)
            hint = "" if all_alike else ". With on_error=skip such rows are left out and counted."
            raise DataError(message + hint) from None
        self.skipped[bad.reason] += 1
        if self.skipped.total() <= SHOWN:
            print_line(f"skipped {message}", sys.stderr)

    def check_any(self, source: str) -> None:
        """Raise DataError when no row of an input was usable: all rows were skipped as bad, or there was none.

        source: the name of the input, for the message.
        """
        if self.rows == self.skipped.total():
            raise DataError(f"{source}: no sample to write. {self if self.rows else 'It has no rows.'}")

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.most_common())
        return f"skipped {self.skipped.total():,} of {self.rows:,} rows: {reasons}"
