"""Compute the quantities that the health checks of a run compare with their limits, and texts that the checks show.

A quantity is missing, or None, if the run has not recorded its metrics. A condition is the number 1 (yes) or 0 (no).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean, median
from typing import Any

from dyad.eval.report.curves import History, evaluations, sides
from dyad.eval.results.kinds import HEADLINES, KINDS, companion, headline, label
from dyad.eval.results.summary import Result, evaluator_name, finite, lead, number, part, score, signed
from dyad.train.tracking.panel_types import Score

Numbers = dict[str, Any]  # name → a number, or words about numbers, for the texts of CHECKS
ENOUGH = 8  # the fewest values of a metric from which a trend is computed
RECENT = 3  # the number of last values whose median is the present value of a metric
SHORT = 1.0  # seconds of recorded steps up to which a share of waiting says nothing: a loader starts in such a time
TREND = 0.02  # relative fall of the loss, or rise of the accuracy in the batch, that counts as learning
COMPARED = 1024  # pairs of a batch, at most, whose accuracy is recorded
GUESS = 0.1  # a loss less than this many nats below that of guessing counts as guessing
EASY = 0.9  # accuracy in the batch from which on `memory_numbers` compares it
WORTH = 0.05  # a score less than this above chance counts as useless
DROP = 0.02  # fall from the best evaluation that counts as noise if there is no interval


# ---- numbers of the training -----------------------------------------------------------------------------------------


def training_numbers(options: Mapping[str, Any], history: History) -> Numbers:
    """Compute all that health checks need of the training metrics: name → number, or a text that a check shows.

    A number whose metrics the run has not recorded is None or missing. options: the configuration of the run, dotted
    key → value. history: metric, such as train/loss → step → value.
    """
    run = _Training(options, history)
    return run.direct() | run.loss() | run.warmup() | run.steps() | run.temperature() | run.embeddings()


@dataclass(frozen=True)
class _Training:
    """Computes from the training metrics the quantities that health checks compare with limits.

    Its methods take the names of training metrics without "train/".
    """

    options: Mapping[str, Any]
    history: History

    def values(self, name: str) -> list[float]:
        """Return all values of one training metric, in the order of steps. name: the metric without "train/"."""
        return list(self.history.get(f"train/{name}", {}).values())

    def now(self, name: str) -> float | None:
        """Return the median of the last RECENT values of a training metric; None if it has none.

        name: the metric without "train/". Values that are not finite do not count.
        """
        return median(values[-RECENT:]) if (values := self.values(name)) else None

    def sides(self, name: str) -> dict[str, float]:
        """Return the present values of the metrics NAME_x and NAME_y, as the word for the side, such as image → value.

        NAME is the argument `name`. The present value is the median of the last RECENT values. Missing metrics are left
        out.
        """
        words = dict(zip("xy", sides(self.options), strict=True))
        return {words[side]: value for side in "xy" if (value := self.now(f"{name}_{side}")) is not None}

    def direct(self) -> Numbers:
        """Return quantity → number for the health checks that use training metrics almost as they are.

        mi_bound, log_k, share_never_visited, staleness: the present value (the median of the last values) of the metric
        with this name. bound_share: mi_bound divided by log_k; above_guess: mi_bound; only if log_k is above 0.
        effective_negatives, batch_accuracy: the smaller present value of sides x and y. waiting_share: the sum of
        data_time divided by that of batch_time; None if the latter is not above SHORT. None stands for a quantity whose
        metrics the run has not recorded.
        """
        found: Numbers = {name: self.now(name) for name in ("mi_bound", "log_k", "share_never_visited", "staleness")}
        if found["mi_bound"] is not None and found["log_k"] and found["log_k"] > 0:
            found["bound_share"] = found["mi_bound"] / found["log_k"]
            found["above_guess"] = found["mi_bound"]
        found["effective_negatives"] = min(self.sides("effective_negatives").values(), default=None)
        found["batch_accuracy"] = min(self.sides("accuracy").values(), default=None)
        total = sum(self.values("batch_time"))
        found["waiting_share"] = sum(self.values("data_time")) / total if total > SHORT else None
        return found

    def loss(self) -> Numbers:
        """Return {"loss_is_flat": a code, "losses": a sentence with the loss at the start and at the end}.

        The code is 0 if the training loss falls or the accuracy in the batch rises. If neither happens, it is 1 for a
        run that began with trained weights (init_from), for which this may be fine, and 2 for other runs. Returns {} if
        the run has recorded fewer than ENOUGH losses, or if the code would be 0 but the loss is that of guessing, which
        the check on above_guess reports.
        """
        loss, accuracy = self.values("loss"), self.values("accuracy_x")
        if len(loss) < ENOUGH:
            return {}
        bound = self.now("mi_bound")
        guesses = bound is not None and bound < GUESS
        (first, last), (low, high) = _ends(loss), _ends(accuracy) if len(accuracy) >= ENOUGH else (0.0, 0.0)
        learns = last < first - TREND * abs(first) or high - low > TREND
        if guesses and learns:
            return {}
        flat = 0 if learns else 2 if self.options.get("init_from") is None else 1
        return {"loss_is_flat": flat, "losses": f"Loss {_short(first)} at the start, {_short(last)} at the end."}

    def warmup(self) -> Numbers:
        """Return quantity → number on the warm-up of the learning rate; {} without a warm-up, or if one is unknown.

        "warmup": its steps. "total": the steps of the run. "warmup_share": their ratio. "peak": the highest learning
        rate that was logged. "lr": the option optim.lr.
        """
        given, lr, rates = *(finite(self.options.get(f"optim.{key}")) for key in ("warmup", "lr")), self.values("lr")
        total = finite(self.options.get("steps")) or max(self.history.get("train/loss", {}), default=0)
        if not given or not lr or not rates or not total:
            return {}
        steps = given if given >= 1 else given * total
        return {"warmup": steps, "warmup_share": steps / total, "total": total, "peak": max(rates), "lr": lr}

    def steps(self) -> Numbers:
        """Return quantity → number about skipped steps and replaced samples.

        "skipped", "steps", "skipped_share": the number of skipped steps, of all steps, and their ratio. "substituted",
        "samples_seen": the number of replaced samples and of all samples. Quantities whose metrics the run has not
        recorded are left out.
        """
        found: Numbers = {}
        if skipped := self.history.get("train/skipped"):
            not_finite = len(skipped) - len(self.values("loss"))  # a record has both; a loss that is not finite is null
            count, steps = max(int(max(skipped.values())), not_finite), max(skipped)
            found |= {"skipped_share": count / max(steps, 1), "skipped": count, "steps": steps}
        if replaced := self.values("substituted"):
            samples = max(self.history.get("samples_seen", {}).values(), default=0)
            found |= {"substituted": int(max(replaced)), "samples_seen": samples}
        return found

    def temperature(self) -> Numbers:
        """Return quantity → number or text on whether the learnt temperature has reached one of its limits.

        The lower limit is the option objective.min_temperature, the upper limit is 1. Returns {} if the temperature is
        not learnt or not recorded, or has no lower limit. Otherwise the result has "at_lower_clamp": 1 if the
        temperature is at the lower limit, else "at_upper_clamp": 1 at the upper limit or 0 between the two. It also has
        two texts, "temperature" (its present value) and "clamp" (the lower limit).
        """
        scale, clamp = self.now("logit_scale"), finite(self.options.get("objective.min_temperature"))
        if not scale or not clamp or not self.options.get("objective.learnable"):
            return {}
        at_clamp = {"at_lower_clamp": 1} if 1 / scale <= clamp * 1.001 else {"at_upper_clamp": int(1 / scale >= 0.999)}
        return {**at_clamp, "temperature": _short(1 / scale), "clamp": _short(clamp)}

    def embeddings(self) -> Numbers:
        """Return quantity → number, or text that a health check shows, about the embeddings.

        "uniformity" is the larger value of this metric (how spread out the embeddings are) of sides x and y, given only
        after the learning-rate warm-up. "duplicates" is the larger share of duplicates in the batches of sides x and y,
        or 0 if the option objective.duplicates is not "keep", or the loss compares no pairs. The other entries are
        texts. Quantities whose metrics the run has not recorded are left out.
        """
        found: Numbers = {}
        uniformity, duplicates = self.sides("uniformity"), self.sides("duplicates")
        warmup = self.warmup().get("warmup", 0)
        if uniformity and max(self.history.get("train/loss", {}), default=-inf) > warmup:
            side = max(uniformity, key=lambda s: uniformity[s])
            words = ", ".join(f"{s} {value:.2f}".replace("-", "−") for s, value in uniformity.items())
            found |= {"uniformity": uniformity[side], "side": side, "uniformities": words}
        if duplicates:
            choice = self.options.get("objective.duplicates") or "keep"
            compared = choice == "keep" and self.options.get("objective.contrastive") != 0
            found["duplicates"] = max(duplicates.values()) if compared else 0
            found["duplicate_shares"] = ", ".join(f"{side} {value:.1%}" for side, value in duplicates.items())
            found["handling"] = "" if choice == "keep" else f"; objective.duplicates={choice}"
        return found


# ---- numbers of evaluations ------------------------------------------------------------------------------------------


def result_numbers(result: Result) -> Numbers:
    """Compare a result with the chance level (the score of a random ranking) and with its baselines.

    Returns quantity → number, or a text that a health check shows. "dataset": the name of the data set. If a chance
    level is known: "evidence", a text, and either "no_better_than_chance", 1 or 0, or "chance_is_possible": 1 if the
    intervals leave it open. For each baseline B whose difference is known: "lead_B", a text, and either "behind_B", 1
    or 0, or "undecided_B": 1. All cut-offs of the headline metric are compared, such as R@1, R@5 and R@10, because on a
    small data set only a larger one may be clearly above chance. Of a plugin's task, for which it is not known whether
    higher values are better, nothing is compared.
    """
    names = _depths(headline(result["metrics"]), result["metrics"]) if result["task"] in KINDS else []
    found: Numbers = {"dataset": result["dataset"]}
    judged = {m: s for m in names if (s := score(result, m)).value is not None and s.chance is not None}
    if judged:
        above = {m: [end - (s.chance or 0) for end in (*_interval(s), s.value or 0)] for m, s in judged.items()}
        best = max(above, key=lambda m: above[m][0])
        found["evidence"] = f"{label(best)} {_with_ends(judged[best])}, chance {number(judged[best].chance)}"
        is_better = above[best][0] > 0
        if is_better or all(high < WORTH for _, high, _ in above.values()) or all(v <= 0 for *_, v in above.values()):
            found["no_better_than_chance"] = int(not is_better)
        else:
            found["chance_is_possible"] = 1
    for baseline, system in part(result, "baselines").items():
        leads = {m: s for m in names if (s := lead(system, m)).value is not None}
        if leads:
            ahead = [m for m, s in leads.items() if _interval(s)[0] > 0]
            behind = [m for m, s in leads.items() if _interval(s)[1] < 0]
            shown = next(iter([*ahead, *behind, *leads]))
            found[f"lead_{baseline}"] = f"{_with_ends(leads[shown], signed)} {label(shown)}"
            if bool(ahead) == bool(behind):
                found[f"undecided_{baseline}"] = 1
            else:
                found[f"behind_{baseline}"] = int(bool(behind))
    return found


def memory_numbers(options: Mapping[str, Any], training: Numbers, result: Result) -> Numbers:
    """Return how far the accuracy in the training batches is above recall on data.val, and texts that the check shows.

    "learnt_by_heart" is the difference. R@K of n items is about as hard as accuracy among n / K candidates. So the
    metric is R@K with the least K for which n / K is at most the batch size, or COMPARED if that is less; the upper end
    of its interval is subtracted. Returns {} if `result` is not of data.val, if the accuracy is below EASY, or if it,
    the batch size or such a metric is unknown. options: the configuration of the run, dotted key → value. training: the
    result of training_numbers.
    """
    accuracy, batch = training.get("batch_accuracy"), finite(options.get("global_batch_size"))
    names = _depths(headline(result["metrics"]), result["metrics"])
    chances = {m: s.chance for m in names if "R@" in m and (s := score(result, m)).chance and s.value is not None}
    if result["dataset"] != "val" or accuracy is None or accuracy < EASY or not batch:
        return {}
    metric = min((m for m, c in chances.items() if c >= 1 / min(batch, COMPARED)), key=lambda m: chances[m], default="")
    if not metric:
        return {}
    found = score(result, metric)
    words = {"dataset": result["dataset"], "metric": label(metric), "value": _with_ends(found)}
    return {"learnt_by_heart": accuracy - _interval(found)[1], "accuracy": accuracy, **words}


def evaluation_numbers(history: History, results: Sequence[Result]) -> Iterator[Numbers]:
    """Yield, for each evaluator, how far its headline metric has fallen from its best value in training.

    The fall to the last value is "past_best"; with it come the names and values that the texts of the health check
    show. Half the width of the 95 % interval (DROP if unknown) is subtracted from the fall, so a positive "past_best"
    means more than noise. Evaluators that logged this metric fewer than three times are left out; so are those of
    plugins, for which it is not known whether higher values are better: the metric is not in HEADLINES, and no result
    of a task of KINDS is theirs. history: metric → step → value.
    """
    ours = {evaluator_name(result) for result in results if result["task"] in KINDS}
    scores = {evaluator_name(result): score(result, headline(result["metrics"])) for result in results}
    for prefix, metrics in evaluations(history).items():
        name = headline(metrics)
        _, low, high, _ = scores.get(prefix, Score(None))
        noise = DROP if low is None or high is None else (high - low) / 2
        higher_is_better = prefix in ours or companion([name], HEADLINES)
        if higher_is_better and len(values := history[f"{prefix}/{name}"]) >= 3:
            step, last = max(values, key=lambda step: values[step]), values[max(values)]
            yield {
                "past_best": values[step] - last - noise,
                "dataset": prefix.removeprefix("eval/"),
                "metric": label(name),
                "best": values[step],
                "best_step": step,
                "last": last,
            }


def _ends(values: list[float]) -> tuple[float, float]:
    """Return the mean of the first tenth and the mean of the last tenth of `values` (a metric, in step order)."""
    tenth = max(1, len(values) // 10)
    return fmean(values[:tenth]), fmean(values[-tenth:])


def _depths(metric: str, names: Iterable[str]) -> list[str]:
    """Return the metrics in `names` that equal `metric` up to the number at the end, such as R@1 and R@5 for R@1."""
    stem = metric.rstrip("0123456789")
    return [name for name in names if name.rstrip("0123456789") == stem and metric]


def _interval(found: Score) -> tuple[float, float]:
    """Return the ends (low, high) of the interval of a score; the score itself twice if it has no interval."""
    value = found.value or 0.0
    return (value, value) if found.low is None or found.high is None else (found.low, found.high)


def _with_ends(found: Score, shown: Callable[[Any], str] = number) -> str:
    """Return a score as text, followed by its interval in brackets, if it has one. shown: formats each number."""
    ends = "" if found.low is None or found.high is None else f" [{shown(found.low)}, {shown(found.high)}]"
    return f"{shown(found.value)}{ends}"


def _short(value: float) -> str:
    """Format a number for readers: whole from 100 to ten million, else with three significant digits."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"
