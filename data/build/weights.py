"""`python -m data weights`: log q of each item of training data, from how often the item is a positive.

q_j = (n_j + a)^p / Σ_k (n_k + a)^p, where n_j is the expected number of draws of item j in an epoch, a the option add,
and p the option power, which is 0.75 in word2vec (Mikolov et al. 2013). An item that is never drawn has a q only if a
is above 0. A stopped pass over the data cannot be resumed; it takes seconds for 100,000 questions, and for images as
long as reading them once.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.base.files import setting_errors
from dyad.data.base.progress import print_line
from dyad.data.build.items import ItemCounts, ItemRows, count_items, open_items
from dyad.data.cli.options import ImageTask, WeightsOptions
from dyad.data.cli.outputs import checked_new_file, command
from dyad.data.log_weights import LOG_Q, ZETA, LogWeights, write_log_weights
from dyad.data.shards.manifest import summary

SUFFIX = ".safetensors"
MOST, LEAST, LETTERS = 10, 3, 70  # numbers of most and least frequent items shown, and of characters of their texts


def run(arguments: Sequence[str], options: WeightsOptions) -> None:
    """Write log q of each item on one side of the data that the arguments name to options.out, and print a summary.

    With options.temperature τ, ζ = −τ log q is written in its place. Raises ConfigError for options that cannot work,
    DataError for damaged data and if there is no item.
    """
    out = checked_new_file(options.out, [SUFFIX])
    if options.task is not ImageTask.image_text:
        raise ConfigError(f"task={options.task}: items are counted of images with captions, or of questions")
    rows = open_items(arguments, options)
    items = count_items(rows, with_others=options.add > 0)
    if not len(items.keys_n):
        raise DataError(f"{arguments[0]}: there is no item")
    log_q_n = log_q(items.counts_n, options.power, options.add)
    tau = options.temperature
    facts = {"data": summary(rows.manifest), "side": options.side.value, "power": options.power, "add": options.add}
    name, values_n = (LOG_Q, log_q_n) if tau is None else (ZETA, -tau * log_q_n)
    with setting_errors(f"out={out}"):
        write_log_weights(LogWeights(str(out), name, items.keys_n, values_n, facts))
    for line in (*describe(rows, items, log_q_n, options), *_uses(out, name)):
        print_line(line)


def log_q(counts_n: np.ndarray, power: float, add: float) -> np.ndarray:
    """Return log q of n items, float64 (n,), by the formula in the module docstring; the q of all items sum to 1.

    counts_n (n,) float64: n_j, all above 0 if `add` is 0. power, add: p and a of the formula.
    """
    log_weight_n = power * np.log(counts_n + add)
    return log_weight_n - np.logaddexp.reduce(log_weight_n)


def describe(rows: ItemRows, items: ItemCounts, log_q_n: np.ndarray, options: WeightsOptions) -> Iterator[str]:
    """Yield the lines of the summary: the number of items, the entropy of q, the most and the least frequent items.

    log_q_n (n,): log q of `items`. Reads the texts of the shown items again.
    """
    q_n, n = np.exp(log_q_n), len(log_q_n)
    order = np.argsort(-log_q_n, kind="stable")
    effective = float(np.exp(-(q_n * log_q_n).sum()))  # the exponential of the entropy
    never = int((items.counts_n == 0).sum())
    yield f"{n:,} items of side {options.side}, {items.counts_n.sum():,.0f} draws an epoch; {never:,} are never drawn"
    if rows.bad:
        yield f"left out, as training would: {len(rows.bad):,} rows, first {rows.bad[0]}"
    yield f"effective number of items exp(entropy): {effective:,.1f} ({effective / n:.1%})"
    yield f"the {min(MOST, n)} most frequent have {q_n[order[:MOST]].sum():.1%} of q"
    yield f"{'draws':>10} {'q':>9}  item"
    shown = order[:MOST].tolist()
    for number in [*shown, *(j for j in order[-LEAST:].tolist() if j not in shown)]:
        row, key = int(items.rows_n[number]), int(items.keys_n[number])
        text = rows.text(row, key) if row >= 0 else "(no positive of any row)"
        yield f"{items.counts_n[number]:>10,.4g} {q_n[number]:>9.2e}  {' '.join(text.split()):.{LETTERS}}"


def _uses(out: Path, name: str) -> Iterator[str]:
    """Yield the lines that say how training uses the file `out`. name: what its numbers are, LOG_Q or ZETA."""
    yield f"written to {out}; train with"
    yield command(f"  objective=one_sided_dpm objective.importance={name}", {"objective.importance_file": out})
    if name == LOG_Q:
        yield command("  objective=nce objective.noise=file", {"objective.noise_file": out})
