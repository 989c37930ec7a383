"""Health checks of a run: signs of failure in its metrics and results, with explanations and options to change.

CHECKS is a table with a row for each check, which compares one number with its limit. health_numbers.py computes the
numbers of the training, of each evaluation result and of each evaluator. A number that the run has not recorded is not
checked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from dyad.data.base.findings import Finding, Level
from dyad.eval.report import health_numbers
from dyad.eval.report.curves import History, evaluations
from dyad.eval.results.summary import Result


@dataclass(frozen=True)
class Check:
    """The texts of one health check. Names in braces stand for numbers and texts that health_numbers.py computes.

    title, text, fix: describe the problem and what to do. fine: (title, text) shown if there is no problem; None to
    show nothing. fails_above: if the checked number is above this value, the problem is a failure, else a warning.
    """

    title: str
    text: str
    fix: str
    fine: tuple[str, str] | None = None
    fails_above: float = inf


RIGHT_PAIRS = (
    "Are pairs right, and do keys such as data.captions, data.columns, data.sequence.time name the right fields?"
)

# Condition of a problem, "<number> > <limit>" or "<number> < <limit>" → the texts of the check
CHECKS = {
    "loss_is_flat > 0": Check(
        "The loss does not fall",
        "{losses} The pairs teach nothing, or the steps are too small or too large.",
        "Look at the pairs (python -m data check FILE), then try optim.lr three times lower and higher, with "
        "optim.warmup",
        fine=("The loss falls", "{losses}"),
        fails_above=1,
    ),
    "warmup_share > 0.5": Check(
        "The warm-up is most of the run",
        "{warmup:,.0f} of {total:,.0f} steps: the learning rate came to {peak:.2g}, optim.lr is {lr:.2g}.",
        "optim.warmup=0.1, a tenth of the run; or more steps",
        fails_above=0.99,
    ),
    "above_guess < 0.1": Check(
        "The loss is that of guessing",
        "log K minus the loss is {mi_bound:.2f} nats, log K = {log_k:.2f}. Of a guess among the K candidates it is 0.",
        f"{RIGHT_PAIRS} Then a lower optim.lr with optim.warmup=0.1",
        fails_above=-inf,
    ),
    "skipped_share > 0": Check(
        "Steps were skipped",
        "{skipped} of {steps:.0f} had a loss or gradient that is not finite; they changed nothing.",
        "Lower optim.lr, set optim.clip_norm=1, or use precision=bf16 or fp32",
        fine=("Every step counted", "None had a loss or gradient that is not finite."),
        fails_above=0.01,
    ),
    "substituted > 0": Check(
        "Samples could not be used",
        "{substituted:,} of {samples_seen:,.0f} were replaced; ledger.jsonl says which, and why.",
        "python -m data check SHARD for the shards that it names",
        fine=("Every sample could be used", "None had to be replaced by another one."),
    ),
    "at_lower_clamp > 0": Check(
        "The temperature is at its clamp",
        "τ has come down to {clamp} and is held there: the gradient comes from ever fewer negatives, often from wrong "
        "labels.",
        "Duplicates first (objective.duplicates=mask); then a higher objective.min_temperature, or "
        "objective.learnable=false with a temperature you choose",
    ),
    "at_upper_clamp > 0": Check(
        "The temperature is at its upper clamp",
        "τ has gone up to 1: scores are not told apart.",
        "Lower optim.lr, or start at a lower objective.temperature",
        fine=("The temperature is free", "τ = {temperature}; its clamp is {clamp}."),
    ),
    "bound_share > 0.95": Check(
        "The bound is saturated",
        "{mi_bound:.2f} of at most log K = {log_k:.2f} nats. The batch tells the pairs apart already; the number says "
        "little, and little more is learnt.",
        "A larger global_batch_size (with chunk_size it needs no more memory), or hard negatives",
        fine=("The bound has room", "{mi_bound:.2f} of at most log K = {log_k:.2f} nats."),
    ),
    "uniformity > -0.2": Check(  # 0 if all embeddings are one point
        "Embeddings have collapsed",
        "Uniformity {uniformities}; 0 is one single point. Each {side} gets nearly the same embedding.",
        "Lower optim.lr, a longer optim.warmup, a lower objective.temperature; is the tower frozen by mistake?",
        fine=("Embeddings are spread out", "Uniformity {uniformities}; 0 would be collapse."),
        fails_above=-0.2,
    ),
    "effective_negatives < 2": Check(
        "Few negatives count",
        "An anchor's gradient comes from {effective_negatives:.1f} negatives in the mean: a single wrong one rules it.",
        "A higher objective.temperature or objective.min_temperature; objective.duplicates=mask",
        fine=("Many negatives count", "{effective_negatives:.0f} effective ones for an anchor in the mean."),
    ),
    "batch_accuracy > 0.98": Check(
        "The batch has become easy",
        "{batch_accuracy:.1%} of its pairs are told apart: there is little left to learn from it.",
        "A larger global_batch_size; hard negatives (python -m eval.mine); stronger data.augment for images",
    ),
    "learnt_by_heart > 0.5": Check(
        "{dataset}: learnt by heart",
        "{accuracy:.0%} of the pairs of a batch are told apart; here, among as few candidates, {metric} is {value}.",
        "More data, fewer steps, stronger data.augment, a larger optim.weight_decay; or start from trained towers",
        fails_above=0.5,
    ),
    "duplicates > 0.01": Check(
        "Duplicates in the batches",
        "Shares that have an equal twin in their batch: {duplicate_shares}. A twin counts as a wrong answer.",
        "objective.duplicates=mask leaves twins out, objective.duplicates=positive makes them right too",
        fine=("Duplicates do no harm", "Shares that have a twin in their batch: {duplicate_shares}{handling}."),
    ),
    "share_never_visited > 0.5": Check(
        "Most samples were never visited",
        "{share_never_visited:.0%} of the samples have no running mean yet: so far this objective does no more than a "
        "plain one.",
        "Train for several epochs: epochs=5, or more steps",
    ),
    "staleness > 1": Check(
        "Running means are stale",
        "log u is {staleness:.1f} away from its batch in the mean: u lags behind the weights.",
        "A larger objective.gamma, or a lower optim.lr",
        fine=("Running means are fresh", "log u is {staleness:.2f} away from its batch in the mean."),
    ),
    "waiting_share > 0.2": Check(
        "Waiting for data",
        "{waiting_share:.0%} of the time went by waiting for the loader.",
        "More data.workers; data on a local disk; if they are images, packed at the size they are used",
        fine=("Data come fast enough", "{waiting_share:.1%} of the time went by waiting for them."),
        fails_above=0.5,
    ),
    "nothing_evaluated > 0": Check(
        "Nothing was evaluated",
        "A falling loss does not say whether anything is found.",
        "data.val=SHARDS, eval.suite=[…], or python -m eval checkpoint=RUN later",
    ),
    "no_better_than_chance > 0": Check(
        "{dataset}: no better than chance",
        "{evidence}.",
        f"{RIGHT_PAIRS} Then optim.lr and more steps",
        fine=("{dataset}: better than chance", "{evidence}."),
        fails_above=0,
    ),
    "chance_is_possible > 0": Check(
        "{dataset}: not shown to be better than chance",
        "{evidence}.",
        "More data to evaluate on: the interval holds the value of chance; where the loss still falls, more steps",
    ),
    "behind_untrained > 0": Check(
        "{dataset}: behind itself before training",
        "{lead_untrained}.",
        "A lower optim.lr and fewer steps: training forgets what the encoder knew",
        fine=("{dataset}: ahead of itself before training", "{lead_untrained}."),
        fails_above=0,
    ),
    "undecided_untrained > 0": Check(
        "{dataset}: not shown to be ahead of itself before training",
        "{lead_untrained}.",
        "A higher optim.lr, a shorter optim.warmup or more steps; or more data to evaluate on: the interval holds 0",
    ),
    "behind_bm25 > 0": Check(
        "{dataset}: behind BM25",
        "{lead_bm25}.",
        "Hard negatives (python -m eval.mine); or use both: the row “fusion” ranks by both",
        fine=("{dataset}: ahead of BM25", "{lead_bm25}."),
    ),
    "undecided_bm25 > 0": Check(
        "{dataset}: not shown to be ahead of BM25",
        "{lead_bm25}.",
        "Hard negatives (python -m eval.mine); or more data to evaluate on: the interval holds 0",
    ),
    "past_best > 0": Check(
        "{dataset}: past its best",
        "{metric} {best:.3f} at step {best_step:.0f}, {last:.3f} now: it learns the training data by heart.",
        "steps={best_step:.0f}; more data or stronger data.augment; a larger optim.weight_decay",
        fine=(
            "{dataset}: not past its best",
            "Best {metric} {best:.3f} at step {best_step:.0f}, {last:.3f} at the end.",
        ),
    ),
}


def health_checks(options: Mapping[str, Any], history: History, results: Sequence[Result]) -> list[Finding]:
    """Run all health checks on a run; return their findings, the worst first.

    options: the configuration of the run, dotted key → value. history: metric → step → value. results: the evaluation
    results in the run folder.
    """
    training = health_numbers.training_numbers(options, history)
    by_heart = [found for result in results if (found := health_numbers.memory_numbers(options, training, result))]
    if any(found["learnt_by_heart"] > 0.5 for found in by_heart):
        del training["batch_accuracy"]  # its fix, a larger batch, would not help
    checked = [
        training,
        {} if results or evaluations(history) else {"nothing_evaluated": 1},
        *by_heart,
        *(health_numbers.result_numbers(result) for result in results),
        *health_numbers.evaluation_numbers(history, results),
    ]
    found = [_finding(condition, check, numbers) for condition, check in CHECKS.items() for numbers in checked]
    return sorted(filter(None, found), key=lambda finding: list(Level).index(finding.level), reverse=True)


def _finding(problem_if: str, check: Check, numbers: health_numbers.Numbers) -> Finding | None:
    """Return the finding of one health check, which has level fail, warn or ok.

    Returns None if the quantity that it checks is missing, or if all is well and the check has no text that says so.
    problem_if: the condition of a problem, such as "staleness > 1". numbers: name of each quantity → its number, or a
    text to insert into the texts of the check.
    """
    name, sign, limit = problem_if.split()
    if (value := numbers.get(name)) is None:
        return None
    if value > float(limit) if sign == ">" else value < float(limit):
        level, words = Level.fail if value > check.fails_above else Level.warn, (check.title, check.text, check.fix)
    elif check.fine:
        level, words = Level.ok, (*check.fine, "")
    else:
        return None
    title, text, fix = (template.format_map(numbers) for template in words)
    return Finding(level, title, text, fix)
