"""Render the HTML report of a run: collect its properties, metrics and charts for templates/report.html.j2."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dyad.data.base.errors import ConfigError
from dyad.data.base.secrets import public_path
from dyad.data.shards.licences import Notice, notices
from dyad.eval.report import curves
from dyad.eval.report.curves import History, last_value
from dyad.eval.report.gallery import KINDS, View, cases
from dyad.eval.report.health_checks import health_checks
from dyad.eval.report.plots import LINES, confusion_matrix, line_chart, score_histogram
from dyad.eval.report.run_folder import RunFolder
from dyad.eval.results.kinds import Number, groups, headline, label, meanings, protocol_text
from dyad.eval.results.summary import SYSTEMS, Result, classes, confusions, finite, number, part, score, signed
from dyad.train.config import TrainConfig, unit_of
from dyad.train.eval_config import Truth
from dyad.train.losses import OBJECTIVES
from dyad.train.run_folder.folder import SINCE_BEST, all_keys, by_section

FIRST = 8  # the number of data sets that have charts and example cases on the page; others have numbers alone
GALLERIES = 3_000_000  # the most bytes of all example cases; every other part of the page has a bound of its own
CHARTS = 24  # the most charts of evaluations, and of other metrics
FAILURES = 5  # how many of the last hardware failures are described
NOTICE, CONFIG = 12_000, 40_000  # the most characters of a licence notice, and of the configuration
WORST, CONFUSED = 10, 8  # how many classes, and pairs of confused classes, are listed
# Metric of the device → (the entry of "What was trained" that shows it, the format of its text)
DEVICE = {
    "peak_gpu_gib": ("memory", "{:.3g} GiB of one GPU, the peak of the last logged steps"),
    "peak_rss_gib": ("memory", "{:.3g} GiB of one process at the most"),
    "tflops_per_second_per_device": ("tower speed", "{:.3g} TFLOP/s a device"),
    "mfu": ("tower speed", "{:.0%} of the peak of the device (MFU)"),
    "copy_time": ("copies", "{:.2g} s of a step from host to GPU"),
    "outside_towers": ("profile", "{:.1%} of a step outside the towers"),
    "exposed_comm_time": ("profile", "{:.2g} s of a step in nothing but collectives"),
    "launches": ("profile", "{:,.0f} GPU kernels a step"),
}
# Keys that are shown even at their defaults
ALWAYS = "precision objective.similarity objective.temperature optim.lr optim.warmup optim.schedule".split()
# Task → what was trained
LEADS = {
    "image_text": "A dual encoder of images and texts",
    "question_passage": "A dual encoder of questions and passages",
    "views": "An encoder of {items}",
    "labelled": "A classifier of {items}",
    "sequence": "A model of sequences of {items}",
    "language_model": "A language model that scores answers",
}
OF_TEXTS = ("question_passage", "language_model")
# Last part of a key of the model → its words on the page; other keys are shown with blanks in place of "_"
WORDS = {"embed_dim": "projection", "lora_alpha": "LoRA alpha", "lora_targets": "LoRA targets"}
# Keys that `_facts` shows in entries of their own, and that `_unusual` therefore leaves out
SHOWN = """task seed steps init_from experiment global_batch_size objective.name optim.name model.name model.pretrained
model.image.kind model.image.name model.image.pretrained model.image.image_size model.image.frozen model.image.lora_rank
model.text.kind model.text.name model.text.pretrained model.text.frozen model.text.lora_rank
model.context.kind model.context.layers""".split()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def joined(value: Any) -> str:
    """Convert a configuration value to text; the values of a list are separated by commas. None gives ""."""
    return ", ".join(map(str, _list(value)))


def duration(seconds: float) -> str:
    """Convert seconds to words for readers, such as 2 h 3 min, 4 min 10 s or 9 s."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (left, "s")]
    return " ".join(f"{amount:,} {unit}" for amount, unit in parts if amount) or "less than a second"


ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,  # captions, names and notices are written by others
    undefined=StrictUndefined,
    finalize=lambda value: "" if value is None else value,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters |= {f.__name__: f for f in (duration, finite, joined, number, signed)}
ENVIRONMENT.globals |= {f.__name__: f for f in (line_chart, score_histogram, confusion_matrix)}
ENVIRONMENT.globals["colours"] = len(LINES)  # of the lines of charts


def render(run: RunFolder) -> str:
    """Return the HTML report of a run as text.

    Reads the thumbnails of example cases in the run folder, and the licence notices beside the data of the run.
    """
    results = sorted(run.results, key=lambda result: result["dataset"] != "val")
    glance = _random_cases(run, results)
    return ENVIRONMENT.get_template("report.html.j2").render(
        what=LEADS.get(joined(run.options.get("task")), LEADS["image_text"]).format(items=_items(run.options)),
        name=run.path.resolve().name,
        path=shlex.quote(public_path(str(run.path))),
        run=run,
        seconds=_trained_seconds(run),
        unit=unit_of(run.options.get("task")),
        facts=_facts(run),
        glance=glance,
        more=max(0, len(results) - FIRST),
        checks=health_checks(run.options, run.history, results),
        sets=list(_data_sets(run, results, [*glance])),
        over_training=list(curves.evaluation_charts(run.history, results).items())[:CHARTS],
        training=list(curves.training_charts(run.options, run.history).items()),
        health=list(curves.planned_charts(curves.HEALTH, run.options, run.history).items()),
        others=list(curves.other_charts(run.options, run.history).items())[:CHARTS],
        notices=[(public_path(notice.file), notice.text[:NOTICE]) for notice in _notices(run)],
        config=run.config_text[:CONFIG],
        headings=KINDS,
    )


def _data_sets(run: RunFolder, results: Sequence[Result], above: list[Markup]) -> Iterator[dict[str, Any]]:
    """Yield for each data set the fields that the HTML template shows, as a dict.

    Only the first FIRST data sets have a headline metric, a histogram, a confusion matrix and galleries (lists of
    example cases). All galleries together take at most GALLERIES bytes. In a dict, against: the headline metric of each
    baseline as text; galleries: title → kind (best, worst, random) → cases as HTML; left_out: a text that names the
    parts that have no room. above: cases that are at the top of the page already; they are left out of the galleries
    and removed from the list.
    """
    room = GALLERIES
    for position, result in enumerate(results):
        whole, shown, metric = position < FIRST, groups(result), headline(result["metrics"])
        baselines = {SYSTEMS.get(name, name): score(of, metric) for name, of in part(result, "baselines").items()}
        mistakes = [(true, answer, times) for true, answer, times in confusions(result) if true != answer and times]
        galleries: dict[str, dict[str, list[Markup]]] = {}
        left_out = 0
        for dataset, title, listed in _images_first([result] if whole else []):
            for kind, case in cases(listed, run.path, dataset):
                if (html := _case(case)) in above:
                    above.remove(html)
                    continue
                size = len(html.encode("utf-8", "replace"))
                if size <= room:
                    room -= size
                    galleries.setdefault(title.replace("picture", "image"), {}).setdefault(kind, []).append(html)
                else:
                    left_out += 1
        some_cases = f"{left_out} more cases" if left_out else ""
        yield {
            "name": result["dataset"],
            "anchor": f"set-{position}",
            "headline": Number(label(metric), score(result, metric)) if whole and metric else None,
            "against": ", ".join(f"{name} {number(found.value)}" for name, found in baselines.items()),
            "source": result.get("source"),
            "sizes": ", ".join(filter(None, (_sizes(result), protocol_text(result)))),
            "protocol": protocol_text(result),
            "groups": shown,
            "meanings": meanings(shown),
            "worst": classes(result)[:WORST],
            "confused": sorted(mistakes, key=lambda mistake: -mistake[2])[:CONFUSED],
            "scores": part(result, "scores") if whole else {},
            "confusion": part(result, "confusion") if whole else {},
            "galleries": galleries,
            "left_out": some_cases if whole else "Histogram, matrix and cases",
        }


def _random_cases(run: RunFolder, results: Sequence[Result]) -> list[Markup]:
    """Return up to four random example cases as HTML, for the top of the report.

    If there are results of fewer than three data sets, they are at most two. They come from the first gallery that has
    random cases whose answers are images. Cases with text answers of several systems are too wide for this place.
    """
    for dataset, _, listed in _images_first(results):
        drawn = [case for kind, case in cases(listed, run.path, dataset) if kind == "random" and case["pictured"]]
        if drawn:
            return [_case(case) for case in drawn[: 2 if len(results) < 3 else 4]]
    return []


def _case(case: View) -> Markup:
    return Markup(ENVIRONMENT.get_template("case.html.j2").render(case=case))


def _images_first(results: Sequence[Result]) -> list[tuple[str, str, Any]]:
    """Return (data set, title, cases) of all galleries; those whose title ends in "pictures" come first.

    A gallery is a list of example cases. Such a title says that images were searched, as in "text → pictures".
    """
    found = [(result["dataset"], *gallery) for result in results for gallery in part(result, "gallery").items()]
    return sorted(found, key=lambda gallery: not gallery[1].endswith("pictures"))


def _notices(run: RunFolder) -> list[Notice]:
    """Return the licence notices that lie beside the training, evaluation and passage data of the run.

    Returns [] if an option that names such data cannot be parsed.
    """
    keys = ("data.train", "data.val", "data.passage.corpus", "eval.suite")
    named = [value for key in keys for value in _list(run.options.get(key))]
    paths = [value.get("path") if isinstance(value, dict) else value for value in named]
    sources = [path for path in paths if isinstance(path, str)]
    try:
        return notices([*sources, *(result["source"] for result in run.results if result.get("source"))])
    except ConfigError:
        return []


# ---- what was trained ------------------------------------------------------------------------------------------------


def _facts(run: RunFolder) -> dict[str, str]:
    """Return the entries of the list "What was trained" in the HTML report, such as "seed" → "0".

    Entries with an empty text are left out.
    """
    options, history, unit = run.options, run.history, unit_of(run.options.get("task"))
    changed = by_section({key: value for key, value in _unusual(options).items() if not key.startswith("model.")})
    seconds, size = _trained_seconds(run), finite(options.get("global_batch_size")) or 0
    timed_steps = max(history.get("train/batch_time", {}), default=0)
    speed = f", {timed_steps * size / seconds:,.0f} {unit} a second" if seconds and size else ""
    rate, rate_of_each = (last_value(history, f"train/samples_per_second{of}") for of in ("", "_per_device"))
    steps, total, best = f"{run.step:,}", run.state.get("total_steps"), run.state.get("best")
    after = f", {run.state.get(SINCE_BEST)} evaluations after the best" if best else ""
    early = f", stopped early{after}" if run.state.get(SINCE_BEST) else ""
    epochs = last_value(history, "epoch") or 0
    samples = epochs and (last_value(history, "samples_seen") or 0) / epochs
    found = {
        "model": _model(options),
        "objective": ": ".join(filter(None, (joined(options.get("objective.name")), changed.get("objective")))),
        "target": changed.get("target", ""),
        "auxiliary losses": changed.get("also", ""),
        "trained on": joined(options.get("data.train")),
        "samples": f"{samples:,.0f} an epoch, seen {epochs:.3g} times each" if samples else "",
        "evaluated on": joined([*_list(options.get("data.val")), *_list(options.get("eval.suite"))]),
        "began with": public_path(joined(options.get("init_from"))),
        "steps": steps if total is None else f"{steps} of {total:,}{early}",
        "best": f"step {best['step']:,}, {best['metric']} {best['value']:.4f}" if best else "",
        "batch": f"{size:,.0f} {unit} over all processes",
        "training": changed.get("training", ""),
        "optimiser": ": ".join(filter(None, (joined(options.get("optim.name") or "adamw"), changed.get("optim")))),
        "time": f"{duration(seconds)} in steps{speed}" if seconds else "",
        "processes": f"{rate / rate_of_each:.0f}" if rate and rate_of_each else "",
        "went on": "at step " + ", ".join(f"{step:,}" for step in run.resumed_at) if run.resumed_at else "",
        "hardware failures": _failures(run),
        "seed": joined(options.get("seed")),
        **_device_facts(history),
    }
    return {name: value for name, value in found.items() if value}


def _items(options: Mapping[str, Any]) -> str:
    """Return the word for the items of a run, by data.items: images, texts, ids or frames.

    options: the configuration of the run, dotted key → value.
    """
    return (joined(options.get("data.items")) or "pictures").replace("pictures", "images")


def _model(options: Mapping[str, Any]) -> str:
    """Return a text that describes each tower: architecture, initial weights, what is trained, and unusual options.

    Unusual options are those that differ from their defaults. options: the configuration of the run, dotted key →
    value.
    """
    task, items = options.get("task"), _items(options)
    encoder = "language model" if task == "language_model" else "encoder of texts"
    towers = {encoder: "text"} if task in OF_TEXTS else {"images": "image", "texts": "text"}
    of_items: dict[str, list[str]] = {}
    if task == "sequence":
        towers = {name: tower for name, tower in towers.items() if name == items}
        context = " ".join(filter(None, (joined(options.get(f"model.context.{key}")) for key in ("layers", "kind"))))
        of_items = {"items": [items], "contexts": [context or "gru", *_further(options, "model.context.")]}
    of_towers = {side: [*_tower(options, name), *_further(options, f"model.{name}.")] for side, name in towers.items()}
    said = {side: ", ".join(filter(None, words)) for side, words in (of_towers | of_items).items()}
    return "; ".join([*(f"{side}: {words}" for side, words in said.items() if words), *_further(options, "model.")])


def _further(options: Mapping[str, Any], section: str) -> Iterator[str]:
    """Yield a text for each option directly in `section`, such as "model.text.", that differs from its default."""
    for key, value in _unusual(options).items():
        name = key.removeprefix(section)
        if name != key and "." not in name:
            words = WORDS.get(name, name.replace("_", " "))
            said = {True: words, False: f"not {words}", None: f"no {words}"}
            yield said[value] if isinstance(value, bool | None) else f"{words} {public_path(joined(value))}"


def _tower(options: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield texts that describe one tower: architecture, weights, image size, frozen, LoRA. name: "image" or "text"."""
    own = {key: joined(options.get(f"model.{name}.{key}")) for key in ("kind", "name", "pretrained", "image_size")}
    both = {key: joined(options.get(f"model.{key}")) for key in ("name", "pretrained") if own["kind"] == "open_clip"}
    yield " of ".join(filter(None, (own["name"] or both.get("name"), own["kind"])))
    if weights := own["pretrained"] or both.get("pretrained"):
        yield f"weights {weights}"
    if own["image_size"]:
        yield f"{own['image_size']} pixels"
    if options.get(f"model.{name}.frozen"):
        yield "frozen but for its projection"
    if rank := options.get(f"model.{name}.lora_rank"):
        yield f"LoRA of rank {joined(rank)}"


def _failures(run: RunFolder) -> str:
    """Return a text on the hardware failures of a run: their number, the restarts, and the last causes; "" if none."""
    restarts = sum(bool(failure.get("restart")) for failure in run.failures)
    shown = [
        f"step {joined(failure.get('step'))} ({joined(failure.get('hosts'))}): {joined(failure.get('cause'))}"[:300]
        for failure in run.failures
    ]
    return f"{len(shown)}, restarts: {restarts}. {'; '.join(shown[-FAILURES:])}" if shown else ""


def _device_facts(history: History) -> dict[str, str]:
    """Return the entries of `_facts` about the device, name → text, from the last values of the metrics in DEVICE."""
    found: dict[str, list[str]] = {}
    for name, (fact, text) in DEVICE.items():
        if (value := last_value(history, f"train/{name}")) is not None:
            found.setdefault(fact, []).append(text.format(value))
    return {fact: ", ".join(texts) for fact, texts in found.items()}


def _trained_seconds(run: RunFolder) -> float:
    """Return the seconds spent in training steps, over all starts of the run.

    The metric batch_time at a logged step is the mean time of the steps since the previous logged step. It is
    multiplied by the number of these steps, and the products are added.
    """
    times = run.history.get("train/batch_time", {})
    return sum((step - before) * times[step] for before, step in pairwise([0.0, *times]))


def _unusual(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the run that differ from their defaults, dotted key → value.

    The keys in ALWAYS are in the result even with their default, unless it is null, the keys in SHOWN never.
    """
    name = joined(options.get("objective.name"))
    usual = all_keys(TrainConfig)
    if name in OBJECTIVES:
        usual |= {f"objective.{key}": value for key, value in all_keys(OBJECTIVES[name]).items()}
    always = {key for key in ALWAYS if options.get(key) is not None}
    return {k: v for k, v in options.items() if k not in SHOWN and (k in always or v != usual.get(k))}


# ---- what came of it -------------------------------------------------------------------------------------------------


def _sizes(result: Result) -> str:
    """Return a line on a result: sizes of the data set (metrics num_…), what counts as right, the step of the weights.

    Parts that are not known are left out, and truth=pairs, which `protocol_text` has.
    """
    counts = {name.removeprefix("num_"): v for name, v in result["metrics"].items() if name.startswith("num_")}
    sizes = [f"{value:,.0f} {kind.replace('_', ' ')}" for kind, v in counts.items() if (value := finite(v)) is not None]
    step = f"weights of step {result['step']:,}" if isinstance(result.get("step"), int) else ""
    right = "right is what has equal content" if result.get("truth") == Truth.keys else ""
    return ", ".join(filter(None, (*sizes, right, step)))
