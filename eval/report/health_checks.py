"""Health checks of a run: known signs of failure in what it has recorded, each with its meaning and the key to change.

CHECKS is a table. A row compares one number with its limits. The numbers of the training run, of each evaluation
result and of each evaluator are computed below the table; a number that the run has not recorded is not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from statistics import fmean, median
from typing import Any

from eval.report.curves import Records, Results, column, evaluations, option, waiting
from eval.result_kinds import headline, label
from eval.summary import Result, evaluator, finite, lead, number, part, score, signed, systems
from train.findings import Finding, Level

Numbers = dict[str, Any]  # name → a number, or words about numbers, for the texts of CHECKS

ENOUGH = 8  # records; of fewer no trend is computed
RECENT = 3  # records at the end whose median is the value now
SPIKE = 10  # a spike of the gradient norm, as a multiple of its median
TREND = 0.02  # relative fall of the loss, or rise of the accuracy in the batch, that counts as learning
DROP = 0.02  # fall from the best evaluation that counts if there is no interval
TAKES_ALL = 0.5  # share of the answers of one class


@dataclass(frozen=True)
class Check:
    """A row of the table. problem_if: "<number> > <limit>" or "<number> < <limit>".

    fine: title and text if there is no problem. fails_above: a problem is a failure if the number is larger, else a
    warning. Titles, texts and fixes name numbers in braces.
    """

    problem_if: str
    title: str
    text: str
    fix: str
    fine: tuple[str, str] | None = None
    fails_above: float = inf

    def finding(self, numbers: Numbers) -> Finding | None:
        name, sign, limit = self.problem_if.split()
        value = numbers.get(name)
        if value is None:
            return None
        if value > float(limit) if sign == ">" else value < float(limit):
            level, words = Level.fail if value > self.fails_above else Level.warn, (self.title, self.text, self.fix)
        elif self.fine:
            level, words = Level.ok, (*self.fine, "")
        else:
            return None
        title, text, fix = (template.format_map(numbers) for template in words)
        return Finding(level, title, text, fix)


CHECKS = (
    Check(
        "loss_is_flat > 0",
        "The loss does not fall",
        "{losses} The pairs teach nothing, or the steps are too small or too large.",
        "Look at the pairs (python -m data check FILE), then try optim.lr three times lower and higher, with "
        "optim.warmup",
        fine=("The loss falls", "{losses}"),
        fails_above=1,
    ),
    Check(
        "skipped_share > 0",
        "Steps were skipped",
        "{skipped} of {steps:.0f} had a loss or gradient that is not finite; they changed nothing.",
        "Lower optim.lr, set optim.clip_norm=1, or use precision=bf16 or fp32",
        fine=("Every step counted", "None had a loss or gradient that is not finite."),
        fails_above=0.01,
    ),
    Check(
        "substituted > 0",
        "Samples could not be used",
        "{substituted:,} of {samples_seen:,.0f} were replaced; ledger.jsonl says which, and why.",
        "python -m data check SHARD for the shards that it names",
        fine=("Every sample could be used", "None had to be replaced by another one."),
    ),
    Check(
        "gradient_spikes > 0",
        "The gradient spikes",
        "Its norm is {usual_norm} as a rule and was {largest_norm} once: such a step can undo many.",
        "optim.clip_norm=1, or a longer optim.warmup",
        fine=("The gradient is calm", "Its norm is {usual_norm} as a rule, {largest_norm} at most."),
    ),
    Check(
        "at_lower_clamp > 0",
        "The temperature is at its clamp",
        "τ has come down to {clamp} and is held there: the gradient comes from ever fewer negatives, often from wrong "
        "labels.",
        "Duplicates first (objective.duplicates=mask); then a higher objective.min_temperature, or "
        "objective.learnable=false with a temperature you choose",
    ),
    Check(
        "at_upper_clamp > 0",
        "The temperature is at its upper clamp",
        "τ has gone up to 1: scores are not told apart.",
        "Lower optim.lr, or start at a lower objective.temperature",
        fine=("The temperature is free", "τ = {temperature}; its clamp is {clamp}."),
    ),
    Check(
        "bound_share > 0.95",
        "The bound is saturated",
        "{mi_bound:.2f} of at most log K = {log_k:.2f} nats. The batch tells the pairs apart already; the number says "
        "little, and little more is learnt.",
        "A larger global_batch_size (with chunk_size it needs no more memory), or hard negatives",
        fine=("The bound has room", "{mi_bound:.2f} of at most log K = {log_k:.2f} nats."),
    ),
    Check(
        "uniformity > -0.2",  # 0 if all embeddings are one point
        "Embeddings have collapsed",
        "Uniformity {uniformities}; 0 is one single point. Side {side} gives nearly the same embedding to everything.",
        "Lower optim.lr, a longer optim.warmup, a lower objective.temperature; is the tower frozen by mistake?",
        fine=("Embeddings are spread out", "Uniformity {uniformities}; 0 would be collapse."),
        fails_above=-0.2,
    ),
    Check(
        "effective_negatives < 2",
        "Few negatives count",
        "An anchor's gradient comes from {effective_negatives:.1f} negatives in the mean: a single wrong one rules it.",
        "A higher objective.temperature or objective.min_temperature; objective.duplicates=mask",
        fine=("Many negatives count", "{effective_negatives:.0f} effective ones for an anchor in the mean."),
    ),
    Check(
        "batch_accuracy > 0.98",
        "The batch has become easy",
        "{batch_accuracy:.1%} of its pairs are told apart: there is little left to learn from it.",
        "A larger global_batch_size; hard negatives (python -m eval.mine) for questions; stronger data.augment for "
        "pictures",
    ),
    Check(
        "duplicates > 0.01",
        "Duplicates in the batches",
        "{duplicate_shares} have an equal twin in their batch, which counts as a wrong answer.",
        "objective.duplicates=mask leaves twins out, objective.duplicates=positive makes them right too",
        fine=("Duplicates do no harm", "{duplicate_shares} have a twin in their batch{handling}."),
    ),
    Check(
        "share_never_visited > 0.5",
        "Most samples were never visited",
        "{share_never_visited:.0%} of the samples have no running mean yet: so far this objective does no more than a "
        "plain one.",
        "Train for several epochs: epochs=5, or more steps",
    ),
    Check(
        "staleness > 1",
        "Running means are stale",
        "log u is {staleness:.1f} away from its batch in the mean: u lags behind the weights.",
        "A larger objective.gamma, or a lower optim.lr",
        fine=("Running means are fresh", "log u is {staleness:.2f} away from its batch in the mean."),
    ),
    Check(
        "waiting_share > 0.2",
        "Waiting for data",
        "{waiting_share:.0%} of the time went by waiting for the loader.",
        "More data.workers; shards on a local disk; pictures packed at the size they are used",
        fine=("Data come fast enough", "{waiting_share:.1%} of the time went by waiting for them."),
        fails_above=0.5,
    ),
    Check(
        "relative_throughput < 0.7",
        "Training slowed down",
        "{rates}",
        "Look for other jobs, memory that swaps, or throttling",
        fine=("Throughput is steady", "{rates}"),
    ),
    Check(
        "nothing_evaluated > 0",
        "Nothing was evaluated",
        "A falling loss does not say whether anything is found.",
        "data.val=SHARDS, eval.suite=[…], or python -m eval checkpoint=RUN later",
    ),
    Check(
        "no_better_than_chance > 0",
        "{dataset}: no better than chance",
        "{metric} {value}, chance {chance}.",
        "Are pairs right and keys those of the data (data.image_key, data.captions)? Then optim.lr and more steps",
        fine=("{dataset}: better than chance", "{metric} {value}, chance {chance}."),
        fails_above=0,
    ),
    Check(
        "below_largest_class > 0",
        "{dataset}: below the largest class",
        "{accuracy:.3f} are right; always answering the most frequent class gives {largest_class:.3f}.",
        "Prompts and class names of the task file; classes that the training captions never name",
    ),
    Check(
        "one_class_takes_all > 0",
        "{dataset}: one class takes all",
        "“{top_class}” is the answer for {answered:.0%} of the pictures and right for {occurring:.0%}.",
        "Prompts that are alike for all classes but the name; more prompts for each class",
    ),
    Check(
        "behind_untrained > 0",
        "{dataset}: behind itself before training",
        "{lead_untrained}.",
        "A lower optim.lr and fewer steps: training forgets what the encoder knew",
        fine=("{dataset}: ahead of itself before training", "{lead_untrained}."),
        fails_above=0,
    ),
    Check(
        "behind_bm25 > 0",
        "{dataset}: behind BM25",
        "{lead_bm25}.",
        "Hard negatives (python -m eval.mine); or use both: the row “fusion” ranks by both",
        fine=("{dataset}: ahead of BM25", "{lead_bm25}."),
    ),
    Check(
        "past_best > 0",
        "{dataset}: past its best",
        "{metric} {best:.3f} at step {best_step:.0f}, {last:.3f} now: it learns the training data by heart.",
        "steps={best_step:.0f}; more data or stronger data.augment; a larger optim.weight_decay",
        fine=(
            "{dataset}: not past its best",
            "Best {metric} {best:.3f} at step {best_step:.0f}, {last:.3f} at the end.",
        ),
    ),
)


def health_checks(config: Mapping[str, Any], records: Records, results: Results) -> list[Finding]:
    """All findings, the worst first.

    config: the tree of config.yaml. records: lines of metrics.jsonl. results: the files of eval/.
    """
    noise = {evaluator(result): _half_width(result) for result in results}
    checked = [
        _Run(config, records).numbers(),
        {} if results or evaluations(records) else {"nothing_evaluated": 1},
        *(_result_numbers(result) for result in results),
        *_evaluation_numbers(records, noise),
    ]
    findings = [found for check in CHECKS for numbers in checked if (found := check.finding(numbers))]
    return sorted(findings, key=lambda found: list(Level).index(found.level), reverse=True)


# ---- numbers of the training -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """What training has recorded."""

    config: Mapping[str, Any]
    records: Records

    def values(self, name: str) -> list[float]:
        return list(column(self.records, f"train/{name}").values())

    def now(self, name: str) -> float | None:
        """The median of the last few values."""
        values = self.values(name)
        return median(values[-RECENT:]) if values else None

    def sides(self, name: str) -> dict[str, float]:
        """The value now of a metric of the sides x and y, for the sides that have it."""
        return {side: value for side in "xy" if (value := self.now(f"{name}_{side}")) is not None}

    def numbers(self) -> Numbers:
        found: Numbers = {name: self.now(name) for name in ("mi_bound", "log_k", "share_never_visited", "staleness")}
        if found["mi_bound"] is not None and found["log_k"] and found["log_k"] > 0:
            found["bound_share"] = found["mi_bound"] / found["log_k"]
        for name, metric in (("effective_negatives", "effective_negatives"), ("batch_accuracy", "accuracy")):
            found[name] = min(self.sides(metric).values(), default=None)
        found["waiting_share"] = waiting(self.records)
        return found | self._loss() | self._steps() | self._gradient() | self._temperature() | self._embeddings()

    def _loss(self) -> Numbers:
        loss, accuracy = self.values("loss"), self.values("accuracy_x")
        if len(loss) < ENOUGH:
            return {}
        (first, last), (low, high) = _ends(loss), _ends(accuracy) if len(accuracy) >= ENOUGH else (0.0, 0.0)
        learns = last < first - TREND * abs(first) or high - low > TREND
        flat = 0 if learns else 2 if option(self.config, "init_from") is None else 1
        return {"loss_is_flat": flat, "losses": f"Loss {_short(first)} at the start, {_short(last)} at the end."}

    def _steps(self) -> Numbers:
        """Skipped steps, replaced samples and the throughput."""
        found: Numbers = {}
        if skipped := column(self.records, "train/skipped"):
            broken = sum("train/loss" in r and finite(r["train/loss"]) is None for r in self.records)
            count, steps = max(int(max(skipped.values())), broken), max(skipped)
            found |= {"skipped_share": count / max(steps, 1), "skipped": count, "steps": steps}
        if replaced := self.values("substituted"):
            seen = max(column(self.records, "samples_seen").values(), default=0)
            found |= {"substituted": int(max(replaced)), "samples_seen": seen}
        rates = self.values("samples_per_second")
        if len(rates) >= ENOUGH:
            before, now = median(rates[: len(rates) // 2]), median(rates[-(len(rates) // 4) :])
            words = f"{_short(before)} pairs a second in the first half, {_short(now)} at the end."
            found |= {"relative_throughput": now / before if before else 1.0, "rates": words}
        return found

    def _gradient(self) -> Numbers:
        norms = self.values("grad_norm")
        if len(norms) < ENOUGH:
            return {}
        usual, largest = median(norms), max(norms)
        spikes = largest > SPIKE * usual
        if spikes and option(self.config, "optim.clip_norm") is not None:
            return {}
        return {"gradient_spikes": int(spikes), "usual_norm": _short(usual), "largest_norm": _short(largest)}

    def _temperature(self) -> Numbers:
        scale, clamp = self.now("logit_scale"), finite(option(self.config, "objective.min_temperature"))
        if not scale or not clamp or not option(self.config, "objective.learnable", False):
            return {}
        at_clamp = {"at_lower_clamp": 1} if 1 / scale <= clamp * 1.001 else {"at_upper_clamp": int(1 / scale >= 0.999)}
        return {**at_clamp, "temperature": _short(1 / scale), "clamp": _short(clamp)}

    def _embeddings(self) -> Numbers:
        """Spread of the embeddings, once the warm-up is over, and duplicates in the batches."""
        found: Numbers = {}
        uniformity, duplicates = self.sides("uniformity"), self.sides("duplicates")
        warmup = finite(option(self.config, "optim.warmup")) or 0
        if uniformity and max(column(self.records, "train/loss"), default=-inf) > warmup:
            side = max(uniformity, key=lambda s: uniformity[s])
            words = ", ".join(f"{s} {value:.2f}".replace("-", "−") for s, value in uniformity.items())
            found |= {"uniformity": uniformity[side], "side": side, "uniformities": words}
        if duplicates:
            choice = option(self.config, "objective.duplicates", "keep")
            shares = ", ".join(f"{value:.1%} of {side}" for side, value in duplicates.items())
            found |= {"duplicates": max(duplicates.values()), "duplicate_shares": shares, "handling": ""}
            if choice != "keep":
                found |= {"duplicates": 0, "handling": f"; objective.duplicates={choice}"}
        return found


# ---- numbers of evaluations ------------------------------------------------------------------------------------------


def _result_numbers(result: Result) -> Numbers:
    """The headline of a result against chance, against the largest class and against the baselines."""
    name = headline(result["metrics"])
    value, low, _, chance = score(result, name)
    found: Numbers = {"dataset": result["dataset"], "metric": label(name)} | _confusion(result)
    if value is not None and chance is not None:
        found |= {"value": number(value), "chance": number(chance)}
        found["no_better_than_chance"] = int((value if low is None else low) <= chance)
        largest = score(result, "majority_class_share").chance
        if name == "acc1" and largest is not None:
            found |= {"below_largest_class": int(chance < value < largest)}
            found |= {"accuracy": value, "largest_class": largest}
    for baseline in ("untrained", "bm25"):
        ahead, low, high, _ = lead(systems(result).get(baseline) or {}, name)
        if ahead is not None:
            ends = "" if low is None or high is None else f" [{signed(low)}, {signed(high)}]"
            found[f"lead_{baseline}"] = f"{signed(ahead)} {name}{ends}"
            behind, is_ahead = (ahead if high is None else high) < 0, (ahead if low is None else low) > 0
            if behind or is_ahead:
                found[f"behind_{baseline}"] = int(behind)
    return found


def _confusion(result: Result) -> Numbers:
    """Whether one class is the answer far more often than it occurs."""
    confusion = part(result, "confusion")
    counts, classes = confusion.get("counts") or [], confusion.get("classes") or []
    total = sum(map(sum, counts))
    if not total:
        return {}
    predicted = [sum(row[c] for row in counts) / total for c in range(len(classes))]
    top = max(range(len(classes)), key=lambda c: predicted[c])
    answered, occurring = predicted[top], sum(counts[top]) / total
    takes_all = answered > TAKES_ALL and answered > 2 * occurring
    found = {"answered": answered, "occurring": occurring, "top_class": classes[top]}
    return {"one_class_takes_all": int(takes_all), **found}


def _evaluation_numbers(records: Records, noise: Mapping[str, float]) -> Iterator[Numbers]:
    """The headline of each evaluator over the steps: its best value and its last one.

    noise: evaluator → half the width of the headline's interval.
    """
    for prefix, metrics in evaluations(records).items():
        name = headline(metrics)
        values = column(records, f"{prefix}/{name}")
        if len(values) >= 3:
            step, last = max(values, key=lambda step: values[step]), values[max(values)]
            yield {
                "past_best": values[step] - last - noise.get(prefix, DROP),
                "dataset": prefix.removeprefix("eval/"),
                "metric": label(name),
                "best": values[step],
                "best_step": step,
                "last": last,
            }


def _half_width(result: Result) -> float:
    _, low, high, _ = score(result, headline(result["metrics"]))
    return DROP if low is None or high is None else (high - low) / 2


def _ends(values: list[float]) -> tuple[float, float]:
    """Means of the first and of the last tenth."""
    tenth = max(1, len(values) // 10)
    return fmean(values[:tenth]), fmean(values[-tenth:])


def _short(value: float) -> str:
    """Three significant digits, without an exponent below ten million."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"
