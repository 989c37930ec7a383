"""Results as they stand in `eval/*.json`, made by hand: one of pictures, one of classes, one of passages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

COLOURS = ("red", "lime", "blue", "yellow", "cyan")


def _picture(i: int, **more: Any) -> dict[str, Any]:
    return {"id": str(i), "text": f"the {COLOURS[i]} square", "picture": f"{i}.webp", **more}


def retrieval() -> dict[str, Any]:
    answers = [_picture(i, score=0.9 - i / 10, right=i == 1) for i in range(5)]
    case = {"query": {"id": "q1", "text": "a lime square"}, "value": {"rank": 2}, "right": [_picture(1)]}
    return {
        "dataset": "val",
        "source": "shards/val.tar",
        "task": "zeroshot_retrieval",
        "metrics": {"image_to_text_R@1": 0.5, "image_to_text_mean_rank": 2.0},
        "chance": {"image_to_text_R@1": 0.2},
        "intervals": {"image_to_text_R@1": [0.4, 0.6], "image_to_text_mean_rank": None},
        "gallery": {
            "text → pictures": [
                {**case, "kind": "best", "systems": {"model": answers}},
                {**case, "kind": "worst", "systems": {"model": answers[:3]}},
            ]
        },
        "scores": {"edges": [-1.0, 0.0, 0.5, 1.0], "right": [0, 1, 3], "wrong": [6, 2, 0], "best_wrong": [0, 3, 1]},
    }


def zero_shot() -> dict[str, Any]:
    classes = [{"id": name, "text": name, "score": 0.5, "right": name == "red"} for name in COLOURS[:2]]
    return {
        "dataset": "colours",
        "source": "wds/colours",
        "task": "zeroshot_classification",
        "metrics": {"acc1": 0.75},
        "chance": {"acc1": 0.5},
        "intervals": {"acc1": [0.6, 0.9]},
        "gallery": {
            "picture → classes": [
                {
                    "kind": "random",
                    "query": _picture(0),
                    "value": {"rank": 1},
                    "systems": {"model": classes},
                    "right": classes[:1],
                }
            ]
        },
        "confusion": {"classes": ["red", "lime"], "counts": [[3, 1], [0, 4]]},
        "per_class": {
            "lime": {"num_samples": 4, "accuracy": 1.0},
            "red": {"num_samples": 4, "accuracy": 0.75},
            "blue": {"num_samples": 0, "accuracy": None},
        },
    }


def passages() -> dict[str, Any]:
    def found(text: str, right: bool) -> list[dict[str, Any]]:
        return [{"id": "p1", "title": "Jacob", "text": text, "score": 7.5, "right": right, "spans": [[0, 4]]}]

    return {
        "dataset": "topics",
        "source": "topics/test.jsonl",
        "task": "passage_retrieval",
        "metrics": {"nDCG@10": 0.4},
        "chance": {"nDCG@10": 0.01},
        "intervals": {"nDCG@10": [0.3, 0.5]},
        "baselines": {"bm25": {"metrics": {"nDCG@10": 0.3}, "intervals": {"nDCG@10": [0.2, 0.4]}}},
        "gallery": {
            "question → passages": [
                {
                    "kind": "worst",
                    "query": {"id": "t1", "text": "Who dreamt of a <ladder> | and a stair?"},
                    "value": {"nDCG@10": 0.0},
                    "systems": {"model": found("Esau *sold*\nit all", True), "bm25": found("Esau", False)},
                    "right": [{"id": "p1", "title": "Jacob", "text": "He slept"}],
                }
            ]
        },
    }


def finished(run_dir: Path) -> tuple[list[dict[str, Any]], Path]:
    """The results, with the pictures and the report that belong to them in `run_dir`."""
    results = [retrieval(), zero_shot(), passages()]
    for dataset in ("val", "colours"):
        folder = run_dir / "eval" / f"{dataset}.pictures"
        folder.mkdir(parents=True, exist_ok=True)
        for i, colour in enumerate(COLOURS):
            Image.new("RGB", (24, 24), colour).save(folder / f"{i}.webp")
    report = run_dir / "report.html"
    report.write_text("<!doctype html><html><head><title>toy</title></head><body>the report</body></html>")
    return results, report
