"""A run folder as training and evaluation leave it, made by hand, and what a reader of its page sees."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from PIL import Image

HOSTILE = (
    """<script>alert(1)</script><img src="http://e.example/x" onerror=alert(1)>'"></td></svg></style>"""
    " $x_1$ &amp; {{ 7 * 7 }} \x01"
)
WORDS = ["a red square", "a dog on a roof", "the number seven, written by hand", HOSTILE, "two cups", "a tree"]
CONFIG: dict[str, Any] = {
    "task": "image_text",
    "seed": 3,
    "steps": 200,
    "global_batch_size": 64,
    "chunk_size": None,
    "precision": "fp32",
    "init_from": None,
    "model": {
        "name": None,
        "image": {"kind": "cnn", "name": None, "image_size": 64, "widths": [32, 64]},
        "text": {"kind": "transformers", "name": "pkg:small/model", "pooling": "mean", "frozen": True},
    },
    "data": {"train": "data/samples/emoji/noto-trained.tar", "val": "shards/val.tar", "api_key": "canary-7"},
    "objective": {
        "name": "clip",
        "similarity": "cosine",
        "temperature": 0.07,
        "learnable": True,
        "min_temperature": 0.01,
        "duplicates": "keep",
    },
    "optim": {"lr": 0.001, "warmup": 20, "schedule": "cosine", "clip_norm": None},
    "eval": {"every": 50, "suite": ["zero_shot:groups.json"]},
}


def training(step: int, **changed: Any) -> dict[str, Any]:
    """The line of a healthy step of 200."""
    part = step / 200
    values = {
        "loss": 4.1 - 2 * part,
        "positive_score": 0.1 + 0.4 * part,
        "negative_score": 0.05,
        "mi_bound": 0.1 + 2 * part,
        "log_k": math.log(64),
        "logit_scale": 14.3 + 5 * part,
        "grad_norm": 2.0 - part,
        "lr": 0.001 * (1 - part),
        "skipped": 0.0,
        "alignment": 1.8 - part,
        "uniformity_x": -1.0 - part,
        "uniformity_y": -2.5,
        "accuracy_x": 0.1 + 0.6 * part,
        "accuracy_y": 0.12 + 0.6 * part,
        "duplicates_x": 0.0,
        "duplicates_y": 0.002,
        "effective_negatives_x": 40.0,
        "effective_negatives_min_x": 10.0,
        "effective_negatives_max_x": 60.0,
        "data_time": 0.01,
        "batch_time": 0.5,
        "samples_per_second": 128.0,
        "samples_per_second_per_device": 64.0,
        "peak_rss_gib": 1.25,
        "tflops_per_second_per_device": 0.2 + 0.001 * part,
        **changed,
    }
    return {"step": step, "samples_seen": 64 * step, **{f"train/{name}": value for name, value in values.items()}}


def records(**changed: Any) -> list[dict[str, Any]]:
    """A healthy run: training every 10 of 200 steps, evaluation every 50."""
    lines = [training(step, **changed) for step in range(10, 201, 10)]
    for step in (50, 100, 150, 200):
        scores = {"val/image_to_text_R@1": step / 500, "val/text_to_image_R@1": step / 600, "eval/groups/acc1": 0.4}
        lines.append({"step": step, "samples_seen": 64 * step, **scores})
    return sorted(lines, key=lambda line: line["step"])


def item(i: int, image: bool = False, **more: Any) -> dict[str, Any]:
    """Return item `i` of an example case. image: whether it has a picture."""
    seen = {"picture": f"{i}.webp"} if image else {}
    return {"id": f"id-{i}", "text": WORDS[i % len(WORDS)], **seen, **more}


def case(kind: str, query: dict[str, Any], answers: Mapping[str, Sequence[dict[str, Any]]], **value: float) -> Any:
    """Return an example case of a result. kind: best, worst or random. answers: system → items found."""
    return {"kind": kind, "query": query, "value": value, "systems": answers, "right": [item(4)]}


def found(image: bool, right: int, **more: Any) -> list[dict[str, Any]]:
    """Return five items that were found, best first. right: the index of the right one; above 4: none is right."""
    return [item(i, image, score=0.9 - i / 10, right=i == right, **more) for i in range(5)]


def retrieval() -> dict[str, Any]:
    """Return a result of image–text retrieval, with images."""
    metrics = {f"{d}_R@{k}": 0.1234567 * k for d in ("image_to_text", "text_to_image") for k in (1, 5)}
    counts = {"image_to_text_mean_rank": 9.5, "image_to_text_median_rank": 4.0, "num_images": 60.0, "num_texts": 70.0}
    kinds = ("best", "worst", "random")
    return {
        "dataset": "val",
        "source": "shards/val.tar",
        "task": "zeroshot_retrieval",
        "metrics": {**metrics, **counts, "text_retrieval_recall@1": 0.1234567},
        "chance": {name: 0.01 * (n + 1) for n, name in enumerate(metrics)},
        "intervals": {name: [value - 0.02, value + 0.03] for name, value in metrics.items()},
        "truth": "keys",
        "scores": scores(),
        "gallery": {
            "picture → texts": [case(k, item(3, True), {"model": found(False, 2)}, rank=3) for k in kinds],
            "text → pictures": [case(k, item(3), {"model": found(True, n)[n:]}, rank=1) for n, k in enumerate(kinds)],
        },
    }


def zero_shot() -> dict[str, Any]:
    """Return a result of zero-shot classification, with hostile class names and one without samples."""
    classes = ["cats", HOSTILE, "birds and bees with a very long name", "$\\frac{$ Größe"]
    counts = [[8, 1, 1, 0], [2, 5, 2, 1], [0, 0, 9, 1], [0, 0, 0, 0]]
    return {
        "dataset": "groups",
        "source": "zero_shot:groups.json",
        "task": "zeroshot_classification",
        "metrics": {"acc1": 22 / 30, "mean_per_class_recall": 0.7333, "num_samples": 30.0},
        "chance": {"acc1": 0.25, "mean_per_class_recall": 0.25, "majority_class_share": 1 / 3},
        "intervals": {"acc1": [0.6, 0.85], "mean_per_class_recall": None},
        "per_class": {
            name: {"num_samples": sum(row), "accuracy": row[i] / sum(row) if sum(row) else None}
            for i, (name, row) in enumerate(zip(classes, counts, strict=True))
        },
        "confusion": {"classes": classes, "counts": counts},
        "scores": scores(),
        "gallery": {"picture → classes": [case("random", item(1, True), {"model": found(False, 9)}, rank=7)]},
    }


def passages() -> dict[str, Any]:
    """Return a result of passage retrieval, with baselines."""
    metrics = {"nDCG@10": 0.3517, "Recall@100": 0.6525, "MRR@10": 0.3843, "num_questions": 500.0, "num_passages": 9e3}
    interval = {"nDCG@10": [0.31, 0.39], "Recall@100": [0.6, 0.7], "MRR@10": [0.33, 0.44]}
    others = {"bm25": -0.02, "untrained": 0.11}
    text = f"{'Before it nothing is said. ' * 12}The answer is forty-two, {HOSTILE} {'and so on ' * 20}"
    span = [text.index("forty"), text.index("forty") + 9]
    answers = [
        {
            "id": f"p{i}",
            "title": "Deep" if i else HOSTILE,
            "text": text,
            "spans": [span],
            "score": 3 - i,
            "right": i == 1,
        }
        for i in range(5)
    ]
    return {
        "dataset": "topics",
        "source": "beir:data/samples/topics",
        "task": "passage_retrieval",
        "metrics": metrics,
        "chance": {"nDCG@10": 0.000226, "Recall@100": 0.0032, "MRR@10": 0.0004},
        "intervals": interval,
        "baselines": {
            name: {
                "metrics": {m: v - ahead for m, v in metrics.items() if not m.startswith("num")},
                "intervals": interval,
                "difference": {"nDCG@10": {"value": ahead, "interval": [ahead - 0.01, ahead + 0.01]}},
            }
            for name, ahead in others.items()
        },
        "scores": scores(),
        "gallery": {
            "question → passages": [
                case(
                    k,
                    {"id": "q", "text": "What is the answer?"},
                    dict.fromkeys(("model", "bm25", "untrained"), answers),
                )
                for k in ("best", "worst", "random")
            ]
        },
    }


def scores() -> dict[str, Any]:
    """Return the histograms of scores in a result."""
    edges = np.linspace(-1, 1, 21).round(3).tolist()
    return {"edges": edges, "right": [*[0] * 10, *range(10)], "wrong": [*range(10), *[0] * 10], "best_wrong": [1] * 20}


def write_run(
    folder: Path,
    lines: Sequence[Mapping[str, Any]] | None = None,
    results: Sequence[Mapping[str, Any]] | None = None,
    config: Mapping[str, Any] = CONFIG,
    state: Mapping[str, Any] | None = None,
    log: str = "",
) -> Path:
    """Write a run folder. lines: of metrics.jsonl, results: of eval/; by default of a healthy run on three sets."""
    (folder / "eval").mkdir(parents=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dict(config))))
    shown = records() if lines is None else lines
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in shown))
    status = {"status": "finished", "step": 200, "total_steps": 200, "time": "2026-01-01T00:00:00+00:00"}
    (folder / "run_state.json").write_text(json.dumps(status if state is None else state))
    (folder / "log.txt").write_text(log)
    for result in [retrieval(), zero_shot(), passages()] if results is None else results:
        (folder / "eval" / f"{result['dataset']}.json").write_text(json.dumps(result))
        write_images(folder / "eval" / f"{result['dataset']}.pictures")
    return folder


def finished(run: Path) -> tuple[list[dict[str, Any]], Path]:
    """Return (results, report page) of a finished run; write their images and the page into its folder."""
    results, report = [retrieval(), zero_shot(), passages()], run / "report.html"
    for result in results:
        write_images(run / "eval" / f"{result['dataset']}.pictures")
    report.write_text("<!doctype html><html><head><title>toy</title></head><body>the report</body></html>")
    return results, report


def write_images(folder: Path, size: int = 48, noise: bool = False) -> None:
    """Write six small images, 0.webp …, grey or of noise."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for i in range(6):
        pixels = generator.integers(0, 256, (size, size, 3)) if noise else np.full((size, size, 3), 40 * i)
        file = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(file, "webp", lossless=noise)
        (folder / f"{i}.webp").write_bytes(file.getvalue())


@dataclass
class Seen(HTMLParser):
    """What a parser finds in a page. rows: of each table by its caption, (label, values of <data> in the row)."""

    tags: set[str] = field(default_factory=set)
    attributes: list[tuple[str, str, str | None]] = field(default_factory=list)
    rows: dict[str, list[tuple[str, list[float]]]] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[str] = []
        self._section, self._caption = "", ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        given = dict(attrs)
        self._open.append(tag)
        if tag == "section":
            self._section = given.get("id") or ""
        if tag == "caption":
            self._caption = ""
        if tag == "tbody":
            self.rows[f"{self._section}: {self._caption}"] = []
        if tag == "tr" and "tbody" in self._open:
            self.rows[f"{self._section}: {self._caption}"].append(("", []))
        if tag == "data" and "tbody" in self._open:
            value = given.get("value")
            self.rows[f"{self._section}: {self._caption}"][-1][1].append(float(value or "nan"))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if "caption" in self._open:
            self._caption += data
        if "th" in self._open and "tbody" in self._open:
            rows = self.rows[f"{self._section}: {self._caption}"]
            rows[-1] = ((rows[-1][0] + data).strip(), rows[-1][1])

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def seen(page: Path) -> Seen:
    """Parse a page."""
    parser = Seen()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser
