"""Known signs of failure, looked for in what a run has recorded: each with what it means and which key to change.

A check yields what it found: a failure, a warning, or that all is well; nothing where the run has not recorded what it
looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import fmean, median
from typing import Any

from eval.report.curves import Records, Results, column, waiting
from eval.report.evidence import Evidence
from eval.report.result_signs import baselines, chance, evaluated, overfitting, swallowed
from train.findings import Finding, Level, fail, ok, warn
from train.tracking.headlines import finite

SATURATED = 0.95  # of log K
COLLAPSED = -0.2  # uniformity; 0 is one point
FEW_NEGATIVES = 2.0
EASY = 0.98  # share of the batch that is right
WAITING, MOSTLY_WAITING = 0.2, 0.5  # share of the time of a step
SPIKE = 10  # times the median of the gradient norm
SLOWER = 0.7  # throughput against what it was
ENOUGH = 8  # records below which no trend is told


def signs(config: Mapping[str, Any], records: Records, results: Results) -> list[Finding]:
    """All that was looked for, the worst first."""
    evidence = Evidence(config, records, results)
    found = [sign for check in CHECKS for sign in check(evidence)]
    return sorted(found, key=lambda sign: list(Level).index(sign.level), reverse=True)


# Training -------------------------------------------------------------------------------------------------------------


def learns(e: Evidence) -> Iterator[Finding]:
    loss, right = e.values("loss"), e.values("accuracy_x")
    if len(loss) < ENOUGH:
        return
    first, last = _ends(loss)
    rise = _ends(right)[1] - _ends(right)[0] if len(right) >= ENOUGH else 0.0
    numbers = f"Loss {_short(first)} at the start, {_short(last)} at the end."
    if last < first - 0.02 * abs(first) or rise > 0.02:
        yield ok("The loss falls", numbers)
    else:
        yield (fail if e.option("init_from") is None else warn)(
            "The loss does not fall",
            f"{numbers} The pairs teach nothing, or the steps are too small or too large.",
            "Look at the pairs (python -m data check FILE), then try optim.lr three times lower and higher, with "
            "optim.warmup",
        )


def skipped(e: Evidence) -> Iterator[Finding]:
    counts, broken = e.values("skipped"), sum("train/loss" in r and finite(r["train/loss"]) is None for r in e.records)
    if not counts:
        return
    count = max(int(max(counts)), broken)
    steps = max(column(e.records, "train/skipped"))
    if count == 0:
        yield ok("Every step counted", "None had a loss or gradient that is not finite.")
    else:
        yield (fail if count > 0.01 * steps else warn)(
            "Steps were skipped",
            f"{count} of {steps:.0f} had a loss or gradient that is not finite; they changed nothing.",
            "Lower optim.lr, set optim.clip_norm=1, or use precision=bf16 or fp32",
        )


def substituted(e: Evidence) -> Iterator[Finding]:
    counts = e.values("substituted")
    if not counts:
        return
    count, seen = int(max(counts)), max(column(e.records, "samples_seen").values(), default=0)
    if count == 0:
        yield ok("Every sample could be used", "None had to be replaced by another one.")
    else:
        yield warn(
            "Samples could not be used",
            f"{count:,} of {seen:,.0f} were replaced; ledger.jsonl says which, and why.",
            "python -m data check SHARD for the shards that it names",
        )


def spikes(e: Evidence) -> Iterator[Finding]:
    norms = e.values("grad_norm")
    if len(norms) < ENOUGH:
        return
    usual, most = median(norms), max(norms)
    if most <= SPIKE * usual:
        yield ok("The gradient is calm", f"Its norm is {_short(usual)} as a rule, {_short(most)} at most.")
    elif e.option("optim.clip_norm") is None:
        yield warn(
            "The gradient spikes",
            f"Its norm is {_short(usual)} as a rule and was {_short(most)} once: such a step can undo many.",
            "optim.clip_norm=1, or a longer optim.warmup",
        )


def temperature(e: Evidence) -> Iterator[Finding]:
    scale, least = e.now("logit_scale"), e.number("objective.min_temperature")
    if not scale or not least or not e.option("objective.learnable", False):
        return
    tau = 1 / scale
    if tau <= least * 1.001:
        yield warn(
            "The temperature is at its clamp",
            f"τ has come down to {_short(least)} and is held there: the gradient comes from ever fewer negatives, "
            "often from wrong labels.",
            "Duplicates first (objective.duplicates=mask); then a higher objective.min_temperature, or "
            "objective.learnable=false with a temperature you choose",
        )
    elif tau >= 0.999:
        yield warn(
            "The temperature is at its upper clamp",
            "τ has gone up to 1: scores are not told apart.",
            "Lower optim.lr, or start at a lower objective.temperature",
        )
    else:
        yield ok("The temperature is free", f"τ = {_short(tau)}; its clamp is {_short(least)}.")


def bound(e: Evidence) -> Iterator[Finding]:
    bound, ceiling = e.now("mi_bound"), e.now("log_k")
    if bound is None or not ceiling or ceiling <= 0:
        return
    numbers = f"{bound:.2f} of at most log K = {ceiling:.2f} nats."
    if bound > SATURATED * ceiling:
        yield warn(
            "The bound is saturated",
            f"{numbers} The batch tells the pairs apart already; the number says little, and little more is learnt.",
            "A larger global_batch_size (with chunk_size it needs no more memory), or hard negatives",
        )
    else:
        yield ok("The bound has room", numbers)


def collapse(e: Evidence) -> Iterator[Finding]:
    sides = e.sides("uniformity")
    if not sides or not e.warm:
        return
    side = max(sides, key=lambda s: sides[s])
    numbers = ", ".join(f"{s} {value:.2f}".replace("-", "−") for s, value in sides.items())
    if sides[side] > COLLAPSED:
        yield fail(
            "Embeddings have collapsed",
            f"Uniformity {numbers}; 0 is one single point. Side {side} gives nearly the same embedding to everything.",
            "Lower optim.lr, a longer optim.warmup, a lower objective.temperature; is the tower frozen by mistake?",
        )
    else:
        yield ok("Embeddings are spread out", f"Uniformity {numbers}; 0 would be collapse.")


def negatives(e: Evidence) -> Iterator[Finding]:
    sides = e.sides("effective_negatives")
    if not sides:
        return
    least = min(sides.values())
    if least < FEW_NEGATIVES:
        yield warn(
            "Few negatives count",
            f"An anchor's gradient comes from {least:.1f} negatives in the mean: a single wrong one rules it.",
            "A higher objective.temperature or objective.min_temperature; objective.duplicates=mask",
        )
    else:
        yield ok("Many negatives count", f"{least:.0f} effective ones for an anchor in the mean.")


def easy(e: Evidence) -> Iterator[Finding]:
    right = e.sides("accuracy").values()
    if right and min(right) > EASY:
        yield warn(
            "The batch has become easy",
            f"{min(right):.1%} of its pairs are told apart: there is little left to learn from it.",
            "A larger global_batch_size; hard negatives (python -m eval.mine) for questions; stronger data.augment for "
            "pictures",
        )


def duplicates(e: Evidence) -> Iterator[Finding]:
    sides = e.sides("duplicates")
    if not sides:
        return
    most, numbers = max(sides.values()), ", ".join(f"{value:.1%} of {side}" for side, value in sides.items())
    handled = e.option("objective.duplicates", "keep") != "keep"
    if most > 0.01 and not handled:
        yield warn(
            "Duplicates in the batches",
            f"{numbers} have an equal twin in their batch, which counts as a wrong answer.",
            "objective.duplicates=mask leaves twins out, objective.duplicates=positive makes them right too",
        )
    else:
        how = f"; objective.duplicates={e.option('objective.duplicates')}" if handled else ""
        yield ok("Duplicates do no harm", f"{numbers} have a twin in their batch{how}.")


def state(e: Evidence) -> Iterator[Finding]:
    unseen, stale = e.now("share_never_visited"), e.now("staleness")
    if unseen is not None and unseen > 0.5:
        yield warn(
            "Most samples were never visited",
            f"{unseen:.0%} of the samples have no running mean yet: so far this objective does no more than a plain "
            "one.",
            "Train for several epochs: epochs=5, or more steps",
        )
    if stale is not None and stale > 1:
        yield warn(
            "Running means are stale",
            f"log u is {stale:.1f} away from its batch in the mean: u lags behind the weights.",
            "A larger objective.gamma, or a lower optim.lr",
        )
    elif stale is not None:
        yield ok("Running means are fresh", f"log u is {stale:.2f} away from its batch in the mean.")


# Speed ----------------------------------------------------------------------------------------------------------------


def starving(e: Evidence) -> Iterator[Finding]:
    share = waiting(e.records)
    if share is None:
        return
    if share <= WAITING:
        yield ok("Data come fast enough", f"{share:.1%} of the time went by waiting for them.")
    else:
        yield (fail if share > MOSTLY_WAITING else warn)(
            "Waiting for data",
            f"{share:.0%} of the time went by waiting for the loader.",
            "More data.workers; shards on a local disk; pictures packed at the size they are used",
        )


def slowing(e: Evidence) -> Iterator[Finding]:
    rates = e.values("samples_per_second")
    if len(rates) < ENOUGH:
        return
    before, now = median(rates[: len(rates) // 2]), median(rates[-(len(rates) // 4) :])
    numbers = f"{_short(before)} pairs a second in the first half, {_short(now)} at the end."
    if now < SLOWER * before:
        yield warn("Training slowed down", numbers, "Look for other jobs, memory that swaps, or throttling")
    else:
        yield ok("Throughput is steady", numbers)


CHECKS: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    learns,
    skipped,
    substituted,
    spikes,
    temperature,
    bound,
    collapse,
    negatives,
    easy,
    duplicates,
    state,
    starving,
    slowing,
    evaluated,
    chance,
    swallowed,
    baselines,
    overfitting,
)


def _ends(values: list[float]) -> tuple[float, float]:
    """Means of the first and of the last tenth."""
    tenth = max(1, len(values) // 10)
    return fmean(values[:tenth]), fmean(values[-tenth:])


def _short(value: float) -> str:
    """Three digits that count, and no exponent where a person would not write one."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"
