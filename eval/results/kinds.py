"""The kinds of results, one for each `task` of a result: how they are printed and shown, and labels of their metrics.

To add an evaluator with a new kind of result: write the evaluator, name it in `KINDS` of dyad/evaluation/suite.py, and
add a ResultKind to `KINDS` and labels of its metrics here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dyad.eval.results.summary import PROTOCOL, SYSTEMS, Result, lead, number, part, protocol, score, systems
from dyad.eval.search.index_spec import EXACT
from dyad.train.tracking.panel_types import Score

LONGEST_NAME = 18  # characters of a name in the first column of a printed table; longer names are folded
DIRECTIONS = {"text_to_image_": "text → image ", "image_to_text_": "image → text ", "view_": "view → other view "}
WAYS = ("image_to_text", "text_to_image", "view")  # of retrieval, in the order of the printed table
# column of the printed tables of classifications → metric
ZERO_SHOT = {"acc1": "acc1", "acc5": "acc5", "mean/class": "mean_per_class_recall"}
RARE = {"AUC": "auc", "AUC ≤ 5 %": "partial_auc@0.05"}
PROBE = {"linear": "linear_acc1", "AUC": "auc", "k-NN": "knn_acc1"}
PASSAGE_COLUMNS = 4  # metrics of passages that are shown
# metrics of next items, of answers and of pairs with a score that are printed
NEXT_METRICS = ("HR@1", "HR@", "nDCG@", "MRR")
ANSWER_METRICS = ("choice_accuracy", "log_likelihood", "perplexity")
PAIR_METRICS = ("spearman", "pearson")
# metrics of passages, in the order in which they are shown
PASSAGE_METRICS = "nDCG@10 Recall@100 accuracy@20 accuracy@100 MRR@10 Success@1 accuracy@1 accuracy@5".split()

# ---- vocabulary of the metrics ---------------------------------------------------------------------------------------

# Metrics in order of preference: of those shown first, and of those drawn beside the first. R@ stands for any R@K
HEADLINES = (
    "image_to_text_R@ view_R@ acc1 linear_acc1 HR@10 nDCG@10 accuracy@20 accuracy@5 accuracy@1 choice_accuracy spearman"
).split()
COMPANIONS = "text_to_image_R@ MRR mean_per_class_recall knn_acc1 Recall@100 accuracy@100 perplexity pearson".split()
# Beginning of a metric's name → the words that replace it
LABELS = {**DIRECTIONS, "acc1": "top-1 accuracy", "acc5": "top-5 accuracy", "choice_accuracy": "accuracy of choice"}
LABELS |= {"linear_acc1": "linear probe", "linear_acc5": "linear probe, top-5 accuracy", "linear_": "linear probe, "}
LABELS |= {"knn_acc1": "k-NN", "knn_weighted_acc1": "k-NN, weighted vote", "auc": "AUC", "partial_auc": "partial AUC"}
# Beginning of a label → what the metric means
MEANINGS = {
    "R@": "R@K: share of queries with a right answer among the first K.",
    "median rank": "Median rank: of the first right answer; 1 is best.",
    "top-": "Top-K accuracy: share of images whose class is among the first K.",
    "mean per class recall": "Mean per class recall: top-1 accuracy with every class counted alike.",
    "linear probe": "Linear probe: top-1 accuracy of a logistic regression on frozen features.",
    "k-NN": "k-NN: share of samples whose class most of the nearest training samples have, by cosine.",
    "AUC": "AUC, of a class against all others: 0.5 is chance, 1 is best.",
    "partial AUC": "Partial AUC@R: the same, but only where at most the share R of the wrong ones counts as right.",
    "HR@": "HR@K: share of events whose item is among the first K of all items.",
    "nDCG": "nDCG@K: order of the first K answers against the best possible one; 1 is best.",
    "Recall@": "Recall@K: share of the right passages that are among the first K.",
    "MRR": "MRR: mean of 1 / rank of the first right answer; MRR@10: 0 beyond ten.",
    "Success": "Success@K: share of questions with a right passage among the first K.",
    "log likelihood": "Log likelihood: mean over prompts of the score of the right answers, nats a token.",
    "perplexity": "Perplexity: of the tokens of the right answers; lower is better.",
    "accuracy@": "accuracy@K: share of questions with the answer in one of the first K passages.",
    "accuracy of choice": "Accuracy of choice: share of prompts whose right answer has the highest score.",
    "spearman": "Spearman: correlation of the ranks of the pairs by the model and by their given scores; 1 is best.",
    "pearson": "Pearson: correlation of the scores of the model and the given scores; 1 is best.",
    "recall against exact": "Recall against exact@K: share of the exact first K that the approximate index found.",
}


def headline(metrics: Iterable[str]) -> str:
    """Return the headline metric (the one shown first) among the metric names of an evaluation.

    It is the one that comes first in HEADLINES; if none is there, the first name; "" if there are no names.
    """
    names = list(metrics)
    return companion(names, HEADLINES) or next(iter(names), "")


def companion(metrics: Sequence[str], wanted: Sequence[str] = COMPANIONS) -> str:
    """Return the metric, among the metric names of an evaluation, that a chart shows beside the headline metric.

    It is the one that comes first in `wanted`; "" if none is there. An entry of `wanted` that ends in @, such as R@,
    stands for all names that begin with it.
    """
    return next((n for w in wanted for n in metrics if n == w or (w.endswith("@") and n.startswith(w))), "")


def label(metric: str) -> str:
    """Convert the name of a metric to a label for readers, such as acc1 → top-1 accuracy."""
    start = next((start for start in LABELS if metric.startswith(start)), "")
    return LABELS.get(start, "") + metric.removeprefix(start).replace("_", " ")


def indexes(result: Result, key: str = "index") -> list[str]:
    """Return the sorted specifications of the search indexes of a result; key="instead_of": those asked for in vain."""
    search = part(result, "search")
    return sorted({str(how[key]) for how in (search, *search.values()) if isinstance(how, dict) and how.get(key)})


def protocol_text(result: Result) -> str:
    """Return a text on how a result was evaluated, such as "seen=drop"; "" if as by default.

    The text has the values of `protocol` that are not the default. It names an approximate index and its recall against
    exact search. If the data set was too small for the approximate index that was asked for, and was searched exactly,
    the text says so.
    """
    metrics = result["metrics"]
    found = [f"{key}={value}" for key, value in protocol(result).items() if value != PROTOCOL[key]]
    found += [f"approximate: index {index}" for index in indexes(result) if index != EXACT]
    found += [f"{label(m)} {number(value)}" for m, value in metrics.items() if "recall_against_exact" in m]
    found += [f"exact: too small for index {index}" for index in indexes(result, "instead_of")]
    return ", ".join(found)


def titled(result: Result) -> str:
    """Return the name of the data set of a result, with its `protocol_text`, if any, in brackets."""
    return f"{result['dataset']} ({text})" if (text := protocol_text(result)) else result["dataset"]


# ---- numbers of the page ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """A number of the HTML report with its label: a metric, the value of a baseline, or that of chance.

    label: its name. score: its value. ahead: the score of the model minus the score of this baseline. other:
    whether the value belongs to a baseline or to chance, not to the model.
    """

    label: str
    score: Score
    ahead: Score = Score(None)
    other: bool = False


Groups = dict[str, list[Number]]  # title of a table of the page → its numbers


def groups(result: Result) -> Groups:
    """Return the tables that the HTML report shows for one evaluation result: title of the table → its rows.

    For a result of an unknown task this is a single table with all metrics.
    """
    if kind := KINDS.get(result["task"]):
        return {title: numbers for title, numbers in kind.groups(result).items() if numbers}
    return {result["task"]: _numbers(result, result["metrics"])}


def meanings(shown: Groups) -> list[str]:
    """Return the explanations (MEANINGS) of the metrics in the tables `shown`, each explanation once."""
    labels = [*shown, *(number.label for numbers in shown.values() for number in numbers)]
    return [text for start, text in MEANINGS.items() if any(label.startswith(start) for label in labels)]


def _numbers(result: Result, metrics: Iterable[str], title: str = "") -> list[Number]:
    """Return the rows of a table in the HTML report: for each metric the score of the model, then those of baselines.

    title: text that is removed from the start of a label, because the title of the table says it already.
    """
    return [row for metric in metrics for row in _rows(result, metric, label(metric).removeprefix(title))]


def _rows(result: Result, metric: str, name: str) -> Iterator[Number]:
    """Yield the rows of one metric: the score of the model, then that of each baseline whose difference is known.

    name: the label of the first row.
    """
    yield Number(name, score(result, metric))
    for system, baseline in part(result, "baselines").items():
        if (ahead := lead(baseline, metric)).value is not None:
            yield Number(f"{name}, {SYSTEMS.get(system, system)}", score(baseline, metric), ahead, other=True)


def _retrieval_groups(result: Result) -> Groups:
    """Return direction of the search, such as "text → image" → its rows in the HTML report; [] if it has no metric."""
    shown = [metric for metric in result["metrics"] if not metric.endswith("mean_rank")]
    of_ways = {words: [metric for metric in shown if metric.startswith(start)] for start, words in DIRECTIONS.items()}
    return {words.strip(): _numbers(result, metrics, words) for words, metrics in of_ways.items()}


def _one_table(title: str, result: Result) -> Groups:
    """Return one table of all metrics for the HTML report, as title → rows; the sizes num_… are left out.

    A classification has one more row: the accuracy of always predicting the largest class.
    """
    largest = score(result, "majority_class_share").chance
    always = [] if largest is None else [Number("always the largest class", Score(largest), other=True)]
    return {title: _numbers(result, (m for m in result["metrics"] if not m.startswith("num_"))) + always}


def _passage_groups(result: Result) -> Groups:
    """Return a table for the HTML report for each of the first PASSAGE_COLUMNS metrics of passage retrieval.

    Each has a row for the model, and for each baseline and the chance level (the score of a random ranking) if known.
    """
    found: Groups = {}
    for metric in [m for m in PASSAGE_METRICS if m in result["metrics"]][:PASSAGE_COLUMNS]:
        for name, system in systems(result).items():
            own, value = system is result, score(system, metric)._replace(chance=None)
            if own or value.value is not None:
                row = Number(SYSTEMS.get(name, name), value, lead(system, metric), other=not own)
                found.setdefault(metric, []).append(row)
        if (chance := score(result, metric).chance) is not None:
            found[metric].append(Number("chance", Score(chance), other=True))
    return found


# ---- printed tables --------------------------------------------------------------------------------------------------


def new_table(*columns: str, title: str | None = None, first_width: int | None = LONGEST_NAME) -> Any:
    """Make an empty Rich table for the terminal with these column names and title; None: no title.

    Texts that are too long for their column are broken into several lines. first_width: the most characters of the
    first column; None: as many as fit.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left", box=SIMPLE)
    table.pad_edge, table.padding = False, (0, 1, 0, 0)
    for column in table.columns:
        column.overflow = "fold"
    table.columns[0].max_width = first_width
    return table


def _add_rows(table: Any, name: str, metrics: Sequence[str], result: Result, *more: str) -> None:
    """Add the rows of one result to a printed table: metric values, intervals, baselines and chance levels.

    A known 95 % interval is the second row. Of each baseline there are the values, the lead of the model over it, and
    the interval of the lead. Chance levels are the scores of a random ranking. metrics: the metric of each column.
    name: the first cell of the row with the metric values. more: further cells at the end of this row.
    """
    found = [score(result, metric) for metric in metrics]
    table.add_row(name, *(_cell(s.value) for s in found), *more)
    if any(s.low is not None for s in found):
        table.add_row("  95 %", *(_interval(s) for s in found))
    for system, baseline in part(result, "baselines").items():
        table.add_row(f"  {system}", *(_cell(score(baseline, m).value) for m in metrics))
        ahead = [lead(baseline, m) for m in metrics]
        table.add_row("  model ahead", *(_cell(s.value, "+.3f") for s in ahead))
        table.add_row("    95 %", *(_interval(s) for s in ahead))
    table.add_row("  chance", *(_cell(s.chance, unknown="") for s in found))


def _cell(value: float | None, form: str = ".3f", unknown: str = "-") -> str:
    """Format a value as text; None becomes the text `unknown`. form: a format specification."""
    return unknown if value is None else f"{value:{form}}"


def _interval(found: Score, form: str = ".3f") -> str:
    """Format both ends of a 95 % interval as text, "" if it is not known. form: a format specification."""
    return "" if found.low is None else f"{found.low:{form}} {found.high:{form}}"


def _with_interval(found: Score, form: str = ".3f", unknown: str = "-") -> str:
    """Format a score as a value and, on a second line, its 95 % interval.

    form: a format specification. unknown: the text for a value that is None.
    """
    return f"{_cell(found.value, form, unknown)}\n{_interval(found, form)}".strip()


def _title(result: Result, *counted: str) -> str:
    """Return the title of a printed table: `titled`, and the sizes of the data set.

    counted: the names of the sizes; "images" stands for the value of the metric num_images.
    """
    sizes = [f"{_cell(score(result, f'num_{name}').value, ',.0f')} {name}" for name in counted]
    return f"{titled(result)}: {', '.join(sizes)}"


def _retrieval_tables(results: Sequence[Result]) -> Iterator[Any]:
    """Yield one printed table for each result of image–text or view retrieval, with rows for each direction.

    The columns are the first four R@K and the median rank.
    """
    for result in results:
        ways = [way for way in WAYS if any(metric.startswith(f"{way}_R@") for metric in result["metrics"])]
        ks = [k.removeprefix(f"{ways[0]}_R@") for k in result["metrics"] if k.startswith(f"{ways[0]}_R@")][:4]
        counted = ("images", "texts")[: len(ways)]
        table = new_table("retrieval", *(f"R@{k}" for k in ks), "median rank", title=_title(result, *counted))
        for way in ways:
            median = score(result, f"{way}_median_rank").value  # unknown if an index found only the first ranks
            _add_rows(table, way.replace("_to_", " → "), [f"{way}_R@{k}" for k in ks], result, _cell(median, ".0f"))
        yield table


def _class_tables(title: str, columns: Mapping[str, str], results: Sequence[Result]) -> Iterator[Any]:
    """Yield one table of classifications, with rows for each result: its metrics, 95 % intervals and chance levels.

    Intervals are left out if they are not known. The chance levels are those of random answers. columns: name of a
    column → metric.
    """
    table = new_table(title, *columns, "samples", "largest class")
    for result in results:
        count, largest = score(result, "num_samples").value, score(result, "majority_class_share").chance
        _add_rows(table, titled(result), list(columns.values()), result, _cell(count, ",.0f"), _cell(largest))
    yield table


def _passage_tables(results: Sequence[Result]) -> Iterator[Any]:
    """Yield one printed table for each passage retrieval result, with a row for each system.

    The columns are metrics and the lead of the model: the score of the model minus that of the baseline in the first
    metric.
    """
    for result in results:
        shown = [name for name in PASSAGE_METRICS if name in result["metrics"]][:PASSAGE_COLUMNS]
        metrics = [name for name in result["metrics"] if name in shown]
        table = new_table("system", *metrics, "model ahead", title=_title(result, "questions", "passages"))
        for name, system in systems(result).items():
            ahead = [lead(system, m) for m in metrics[:1] if system is not result]
            cells = [_with_interval(score(system, m)) for m in metrics]
            table.add_row(name, *cells, *(_with_interval(found, "+.3f", "") for found in ahead))
        chance = [score(result, m).chance for m in metrics]
        if any(value is not None for value in chance):
            table.add_row("chance", *(_cell(value, unknown="") for value in chance))
        yield table


def _model_tables(title: str, columns: Sequence[str], counted: Sequence[str], found: Sequence[Result]) -> Iterator[Any]:
    """Yield a printed table for each result: rows for the model and its baselines, a column for each metric.

    title: name of the first column. columns: metrics, shown if a result has them; HR@ stands for HR@K of the last K.
    counted: as in `_title`.
    """
    for result in found:
        named = ([m for m in result["metrics"] if m == c or (c.endswith("@") and m.startswith(c))] for c in columns)
        shown = [*dict.fromkeys(metric for metrics in named for metric in metrics[-1:])]
        table = new_table(title, *map(label, shown), title=_title(result, *counted))
        _add_rows(table, "model", shown, result)
        yield table


@dataclass(frozen=True)
class ResultKind:
    """How results of one task are shown.

    hub_task: the name of the task in the metadata of a model card. groups: returns the tables of one result for the
    HTML report. tables: returns the Rich tables for the terminal from all results of this kind.
    """

    hub_task: str
    groups: Callable[[Result], Groups]
    tables: Callable[[Sequence[Result]], Iterable[Any]]


def _classes(hub_task: str, shown: str, printed: str, columns: Mapping[str, str]) -> ResultKind:
    """Return the ResultKind of a classification.

    hub_task: as in ResultKind. shown: title of its table in the HTML report. printed, columns: title and columns of
    `_class_tables`.
    """
    return ResultKind(hub_task, partial(_one_table, shown), partial(_class_tables, printed, columns))


def _rows_of_model(hub_task: str, shown: str, printed: str, metrics: Sequence[str], *counted: str) -> ResultKind:
    """Return a ResultKind with one table in the HTML report and one printed table per result (see `_model_tables`).

    shown: title of the table in the report. printed, metrics, counted: title, columns and counted of `_model_tables`.
    """
    return ResultKind(hub_task, partial(_one_table, shown), partial(_model_tables, printed, metrics, counted))


KINDS = {
    "zeroshot_retrieval": ResultKind("image-text-retrieval", _retrieval_groups, _retrieval_tables),
    "view_retrieval": ResultKind("image-feature-extraction", _retrieval_groups, _retrieval_tables),
    "zeroshot_classification": _classes("zero-shot-image-classification", "image → class", "zero-shot", ZERO_SHOT),
    "linear_probe": _classes("image-classification", "features → class", "probe", PROBE),
    "text_linear_probe": _classes("text-classification", "features → class", "probe", PROBE),
    "sequence_linear_probe": _classes("other", "context → class", "probe", PROBE),
    "classification": _classes("image-classification", "sample → class", "classes", ZERO_SHOT),
    "text_classification": _classes("text-classification", "sample → class", "classes", ZERO_SHOT),
    "rare_class": _classes("image-classification", "rare class", "rare class", RARE),
    "next_item": _rows_of_model("other", "history → next item", "next item", NEXT_METRICS, "events", "items"),
    "answers": _rows_of_model("text-generation", "prompt → answer", "answers", ANSWER_METRICS, "prompts"),
    "in_context": _rows_of_model("text-generation", "prompt → answer", "answers", ANSWER_METRICS, "prompts"),
    "scored_pairs": _rows_of_model("sentence-similarity", "pair → score", "scored pairs", PAIR_METRICS, "pairs"),
    "passage_retrieval": ResultKind("information-retrieval", _passage_groups, _passage_tables),
}
