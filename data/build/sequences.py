"""`python -m data sequences`: logs for training, validation and test from a log, a corpus in order, or judgements.

split=last (leave one out): the last event of a user is for the test, the one before it for validation. split=time: all
events are divided at two times. split=user: all events of a user are in one part, which a hash of the user's id
determines. Rows that repeat an event (same user, item and time) are left out first, since one copy could be trained on
and the other evaluated; then users with fewer than `least` events are. The division depends only on the data and the
options. The command also writes log q of each item of the training part, by which losses correct for popularity
(objective.importance_file).
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.base.progress import print_line
from dyad.data.cli import outputs
from dyad.data.cli.options import LogSplit, SequencesOptions, group_of
from dyad.data.cli.outputs import Tally
from dyad.data.config import SequenceConfig
from dyad.data.log_weights import LOG_Q, LogWeights, write_log_weights
from dyad.data.question_passage.corpus import open_corpus
from dyad.data.question_passage.judgements import judgements
from dyad.data.sequence.items import item_keys
from dyad.data.sequence.log import LOGS, Log, check_columns, log_files, log_of, read_log
from dyad.data.shards.content_keys import Int64s
from dyad.data.shards.sources import local_path
from dyad.data.shards.text_files import CODECS
from dyad.data.tables.readers import COLUMNAR, open_table

PARTS = ("train", "val", "test")
TRAIN = "python -m train task=sequence data=log model=next_item"
# 300 sequences are 80 steps, after which a GRU from scratch has learnt which item follows another
SETTINGS = ["objective=info_nce", "objective.duplicates=mask", "optim.lr=3e-3", "global_batch_size=64", "epochs=20"]
WEIGHTS = "log_q.safetensors"
TIED = 0.01  # share of equal times from which on a warning is printed
IN_FOLDERS = (*LOGS, *(f"{suffix}{packed}" for suffix in LOGS if suffix not in COLUMNAR for packed in CODECS))
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".7z")
BLOCK = 1 << 16  # events that are written at a time


@dataclass(frozen=True)
class Events:
    """E events of the users that have enough, sorted by user, then by time.

    user_e, item_e (E,) int64: numbers of each event's user and item. time_e (E,) float64: as in the log. users:
    users[u] is the id of user u, also of users that were left out.
    """

    user_e: Int64s
    item_e: Int64s
    time_e: np.ndarray
    users: list[str]


def run(arguments: Sequence[str], options: SequencesOptions) -> None:
    """Divide the events of the input arguments[0] into train, val and test, in the new folder options.out.

    Writes a log of each part and log q of the items of train, and prints the numbers of events. Raises ConfigError for
    options that cannot work, also if a part gets no event; DataError if no user has options.least events, and for
    damaged data.
    """
    out = outputs.checked_new_folder(options.out)
    tally = Tally(options.on_error)
    log = _log(arguments[0], options, tally)
    tally.rows = len(log.item_e) + tally.skipped.total()
    user_e = np.repeat(np.arange(len(log.users)), np.diff(log.starts))
    first_e = _first_of_equals(user_e, log)
    counts_u = np.bincount(user_e[first_e], minlength=len(log.users))
    if not (kept_u := counts_u >= options.least).any():
        longest = counts_u.max(initial=0)
        raise DataError(f"{arguments[0]}: no user has least={options.least} events; the most are {longest}")
    kept_e = first_e & kept_u[user_e]
    events = Events(user_e[kept_e], log.item_e[kept_e], log.time_e[kept_e], log.users)
    part_e = SPLITS[options.split](events, options)
    counts = dict(zip(PARTS, np.bincount(part_e, minlength=len(PARTS)).tolist(), strict=True))
    if empty := next((part for part in PARTS if not counts[part]), None):
        shares = f"val={options.val:g} test={options.test:g}"
        raise ConfigError(f"split={options.split} {shares}: no event is left for {empty}. Change the shares")
    with outputs.new_folder(out) as folder:
        _write_parts(folder, events, log.items, part_e)
        trained_n = np.bincount(events.item_e[part_e == PARTS.index("train")], minlength=len(log.items))
        _write_log_q(folder / WEIGHTS, log.items, trained_n)
    if tally.skipped:
        print_line(str(tally))
    if blank := sum(name != name.strip() for name in (*log.users, *log.items)):
        print_line(f"warning: {blank:,} ids of users or items have a blank at an end: without it they are other ids")
    if repeated := int((~first_e).sum()):
        print_line(f"{repeated:,} rows repeat an event (same user, item and time) and are left out")
    if (tied := _tied(events)) >= TIED:
        print_line(
            f"warning: {tied:.0%} of neighbouring events of a user have equal times. They are in the order of the"
        )
        print_line("rows, and so is what counts as the last one. Take exact times, or sort the rows by time")
    items, dropped = len(np.unique(events.item_e)), int((~kept_u).sum())
    print_line(f"{len(part_e):,} events of {kept_u.sum():,} users, {items:,} items; {dropped:,} users had fewer")
    print_line(f"than least={options.least} events. " + ", ".join(f"{part} {n:,}" for part, n in counts.items()))
    paths = {f"data.{part}": out / f"{part}.jsonl" for part in PARTS[:2]}
    print_line(f"train on them:\n  {outputs.command(TRAIN, paths, *SETTINGS)}")


def _log(source: str, options: SequencesOptions, tally: Tally) -> Log:
    """Return the events of a log, or with options.user_of those of a corpus or of a BEIR folder's judgements.

    The latter have their position as time. tally: gets the bad rows of a log. Raises ConfigError for a source that is
    none of these, and for an archive; DataError for damaged data and for an id that options.user_of does not match.
    """
    if options.user_of is None:
        config = SequenceConfig(options.user, options.item, options.time)
        # a log that is rewritten may have any name; of a folder not all files are logs
        files = log_files(source, "INPUT", IN_FOLDERS if os.path.isdir(local_path(source)) else ("",))
        unpacked = {f"{file}{packed}" for file in files for packed in CODECS}  # gunzip -k leaves both in a folder
        files = [file for file in files if file not in unpacked]
        opened = partial(open_table, names=options.columns)
        for file in files:
            if file.endswith(ARCHIVES):
                raise ConfigError(f"INPUT={file}: is an archive. Unpack it, and name the file of events in it")
            check_columns(opened(file), config, section="")
        return read_log(files, config, on_bad=tally.bad, opened=opened)
    named = enumerate(_id_pairs(local_path(source)))
    return log_of(
        (group_of(name, options.user_of, "user_of", source), item, float(number), 0) for number, (name, item) in named
    )


def _first_of_equals(user_e: Int64s, log: Log) -> np.ndarray:
    """Whether each event of `log` is the first of those with its user, item and time, bool (E,). Without times all are,
    because the number of the row is the time. user_e (E,): number of each event's user."""
    order_e = np.lexsort((log.item_e, log.time_e, user_e))  # is stable
    first_e = np.ones(len(order_e), bool)
    columns = (user_e, log.item_e, log.time_e)
    first_e[order_e[1:]] = np.any([np.diff(column[order_e]) != 0 for column in columns], axis=0)
    return first_e


def _tied(events: Events) -> float:
    """Return the share of events with the time of the event before them, among those that have one of their user."""
    same_user = np.diff(events.user_e) == 0
    return float((np.diff(events.time_e)[same_user] == 0).mean())


def _write_parts(folder: Path, events: Events, items: Sequence[str], part_e: Int64s) -> None:
    """Write the log of each part, PART.jsonl, into `folder`. items: ids by number; part_e: each event's part."""
    with ExitStack() as stack:
        files = [stack.enter_context((folder / f"{part}.jsonl").open("w", encoding="utf-8")) for part in PARTS]
        for start in range(0, len(part_e), BLOCK):
            columns = (part_e, events.user_e, events.item_e, events.time_e)
            for part, user, item, time in zip(*(c[start : start + BLOCK].tolist() for c in columns), strict=True):
                row = {"user": events.users[user], "item": items[item], "time": time}
                files[part].write(json.dumps(row, ensure_ascii=False) + "\n")


def _id_pairs(source: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of ids: (id, id) for each text of a corpus, (question id, passage id) of a BEIR folder's judgements.

    These are the passages that are judged right for a question (grade above 0), in all files of qrels/.
    """
    qrels = Path(source) / "qrels"
    if not qrels.is_dir():
        corpus = open_corpus(source, "INPUT")
        yield from ((name, name) for i in range(len(corpus)) for name in corpus.ids(i, i + 1))
        return
    for file in sorted(qrels.glob("*.tsv")):
        for _, (question, passage), grade in judgements(str(file)):
            if grade > 0:
                yield question, passage


def _write_log_q(path: Path, items: Sequence[str], counts_n: Int64s) -> None:
    """Write the file of log q of the items, by content key; q of an item is its share of the training events.

    items: ids by number. counts_n (n,): number of training events of each item; items without one are left out.
    """
    (found,) = counts_n.nonzero()
    keys_n = item_keys([items[i] for i in found.tolist()])
    order = np.argsort(keys_n)
    log_q_n = np.log(counts_n[found][order] / counts_n.sum())
    write_log_weights(LogWeights(str(path), LOG_Q, keys_n[order], log_q_n))


def _last(events: Events, options: SequencesOptions) -> Int64s:
    """Return the part (index in PARTS) of each event, int64 (E,): the last of a user test, the one before it val.

    Each user must have two events or more.
    """
    (last,) = np.append(np.diff(events.user_e) > 0, True).nonzero()
    part_e = np.zeros(len(events.user_e), np.int64)
    part_e[last - 1], part_e[last] = PARTS.index("val"), PARTS.index("test")
    return part_e


def _by_time(events: Events, options: SequencesOptions) -> Int64s:
    """Return the part (index in PARTS) of each event, int64 (E,): events are divided at two times.

    The parts have about the wanted shares; events of equal time are in one part, so a share may be missed by far.
    """
    times = np.sort(events.time_e)
    shares = 1 - options.val - options.test, 1 - options.test
    bounds = [times[min(int(share * len(times)), len(times) - 1)] for share in shares]
    return np.searchsorted(bounds, events.time_e, side="right")


def _by_hash(events: Events, options: SequencesOptions) -> Int64s:
    """Return the part (index in PARTS) of each event, int64 (E,): that of its user by `part_by_hash`."""
    part_u = [PARTS.index(part_by_hash(user, options.val, options.test)) for user in events.users]
    return np.array(part_u)[events.user_e]


def part_by_hash(name: str, val: float, test: float) -> str:
    """Return the part ("train", "val" or "test") of a group of data, by a hash of the group's name.

    val, test: the shares of these parts, in 0 … 1.
    """
    share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64
    return "test" if share < test else "val" if share < test + val else "train"


SPLITS = {LogSplit.last: _last, LogSplit.time: _by_time, LogSplit.user: _by_hash}
