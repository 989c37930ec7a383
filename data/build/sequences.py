"""`python -m data sequences`: logs for training, validation and test from a log, a corpus in order, or judgements.

split=last (leave one out): the last event of a user is for the test, the one before it for validation. split=time: all
events are divided at two times. split=user: all events of a user are in one part, which a hash of the user's id
determines. The division depends only on the data and the shares. The command also writes log q of each item of the
training part, by which losses correct for popularity (objective.importance_file).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.base.progress import print_line
from dyad.data.cli import outputs
from dyad.data.cli.options import LogSplit, SequencesOptions, group_of
from dyad.data.config import SequenceConfig
from dyad.data.log_weights import LOG_Q, LogWeights, write_log_weights
from dyad.data.question_passage.corpus import open_corpus
from dyad.data.question_passage.judgements import judgements
from dyad.data.sequence.items import item_keys
from dyad.data.sequence.log import log_files, read_log
from dyad.data.shards.sources import local_path

PARTS = ("train", "val", "test")
TRAIN = "python -m train task=sequence data=log model=next_item"
WEIGHTS = "log_q.safetensors"
Event = tuple[str, str, float]  # user, item, time
Users = dict[str, list[tuple[str, float]]]  # user → (item, time) of the events, in order
PartOf = dict[str, list[str]]  # user → name of the part of each event


def run(arguments: Sequence[str], options: SequencesOptions) -> None:
    """Divide the events of the input arguments[0] into train, val and test. Write a log of each part and log q of the
    items into the new folder options.out, and print the numbers of events and a command that trains on them. Users with
    fewer than options.least events are left out.

    Raises ConfigError for options that cannot work or leave a part without events; DataError for damaged data, for an
    id that options.user_of does not match, and if no user has options.least events.
    """
    out = outputs.checked_out(options.out)
    of_users: Users = {}
    for user, item, time in _events(arguments[0], options):
        of_users.setdefault(user, []).append((item, time))
    kept = {user: events for user, events in of_users.items() if len(events) >= options.least}
    if not kept:
        longest = max(map(len, of_users.values()), default=0)
        raise DataError(f"{arguments[0]}: no user has least={options.least} events; the most are {longest}")
    part_of = SPLITS[options.split](kept, options)
    counts: dict[str, int] = dict.fromkeys(PARTS, 0)
    trained = Counter[str]()
    with outputs.new_folder(out) as folder, ExitStack() as stack:
        files = {part: stack.enter_context((folder / f"{part}.jsonl").open("w", encoding="utf-8")) for part in PARTS}
        for user, events in kept.items():
            for part, (item, time) in zip(part_of[user], events, strict=True):
                files[part].write(json.dumps({"user": user, "item": item, "time": time}, ensure_ascii=False) + "\n")
                counts[part] += 1
                trained[item] += part == "train"
        if empty := next((part for part in PARTS if not counts[part]), None):
            shares = f"val={options.val:g} test={options.test:g}"
            raise ConfigError(f"split={options.split} {shares}: no event is left for {empty}. Change the shares")
        _write_log_q(folder / WEIGHTS, +trained)
    items = len({item for events in kept.values() for item, _ in events})
    dropped = len(of_users) - len(kept)
    print_line(f"{sum(counts.values()):,} events of {len(kept):,} users, {items:,} items; {dropped:,} users had fewer")
    print_line(f"than least={options.least} events. " + ", ".join(f"{part} {n:,}" for part, n in counts.items()))
    paths = {f"data.{part}": out / f"{part}.jsonl" for part in PARTS[:2]}
    words = ("objective=nce", "objective.noise=unigram", "epochs=10")
    print_line(f"train on them:\n  {outputs.command(TRAIN, paths, *words)}")


def _events(source: str, options: SequencesOptions) -> Iterator[Event]:
    """Yield the events of a log; with options.user_of, the events of a corpus or of a BEIR folder's judgements. The
    time of such an event is its position among them, from 0.

    Raises ConfigError for another source; DataError for damaged data and for an id that options.user_of does not match.
    """
    if options.user_of is None:
        config = SequenceConfig(options.user, options.item, options.time)
        log = read_log(log_files(source, "INPUT"), config)
        users = np.repeat(np.arange(len(log.users)), np.diff(log.starts))
        for user, item, time in zip(users.tolist(), log.item_e.tolist(), log.time_e.tolist(), strict=True):
            yield log.users[user], log.items[item], time
        return
    for number, (name, item) in enumerate(_id_pairs(local_path(source))):
        yield group_of(name, options.user_of, "user_of", source), item, float(number)


def _id_pairs(source: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of ids: (id, id) for each text of a corpus; in a BEIR folder with judgements, (question id, passage
    id) for each passage that is judged right for a question (grade above 0)."""
    qrels = Path(source) / "qrels"
    if not qrels.is_dir():
        corpus = open_corpus(source, "INPUT")
        yield from ((name, name) for i in range(len(corpus)) for name in corpus.ids(i, i + 1))
        return
    for file in sorted(qrels.glob("*.tsv")):
        for _, (question, passage), grade in judgements(str(file)):
            if grade > 0:
                yield question, passage


def _write_log_q(path: Path, counts: Mapping[str, int]) -> None:
    """Write the file of log q, by content key. q of an item is its share of the training events. counts: number of
    training events by item."""
    keys_n, counts_n = item_keys([*counts]), np.array([*counts.values()], np.float64)
    order = np.argsort(keys_n)
    log_q_n = np.log(counts_n[order] / counts_n.sum())
    write_log_weights(LogWeights(str(path), LOG_Q, keys_n[order], log_q_n))


def _last(users: Users, options: SequencesOptions) -> PartOf:
    return {user: ["train"] * (len(events) - 2) + ["val", "test"] for user, events in users.items()}


def _by_time(users: Users, options: SequencesOptions) -> PartOf:
    times = np.sort([time for events in users.values() for _, time in events])
    shares = 1 - options.val - options.test, 1 - options.test
    bounds = [times[min(int(share * len(times)), len(times) - 1)] for share in shares]
    number = {
        user: np.searchsorted(bounds, [time for _, time in events], side="right") for user, events in users.items()
    }
    return {user: [PARTS[part] for part in parts.tolist()] for user, parts in number.items()}


def _by_hash(users: Users, options: SequencesOptions) -> PartOf:
    return {user: [part_by_hash(user, options.val, options.test)] * len(events) for user, events in users.items()}


def part_by_hash(name: str, val: float, test: float) -> str:
    """Return the part ("train", "val" or "test") of the group of data called `name`, which depends only on a hash of
    the name and on the shares. val, test: the shares of these parts, in 0 … 1."""
    share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64
    return "test" if share < test else "val" if share < test + val else "train"


SPLITS = {LogSplit.last: _last, LogSplit.time: _by_time, LogSplit.user: _by_hash}
