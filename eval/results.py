"""What an evaluation leaves: one JSON file per data set, and a short table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eval.encode import Evaluator, Report
    from train.config import TrainConfig

_RECALLS = (("text_to_image_R@", "image_retrieval_recall@"), ("image_to_text_R@", "text_retrieval_recall@"))


def facts(config: TrainConfig, checkpoint: Path, step: int) -> dict[str, Any]:
    """What the JSON says of the model: one name for the two towers, its weights, the step."""
    towers = (config.model.image, config.model.text)
    names = [t.name or config.model.name or t.kind.value for t in towers]
    short = dict.fromkeys(Path(name).stem if name.endswith(".json") else name for name in names)
    return {"model": "+".join(short), "pretrained": str(checkpoint), "step": step}


def result(report: Report, evaluator: Evaluator, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of one data set: CLIP_benchmark's fields with `facts` of the model, and both names of each recall."""
    theirs = {t + k.removeprefix(o): v for o, t in _RECALLS for k, v in report.metrics.items() if k.startswith(o)}
    return {
        "dataset": evaluator.name.removeprefix("eval/"),
        "source": evaluator.source,
        **facts,
        "task": report.task,
        "metrics": {**report.metrics, **theirs},
        "language": "en",
        "chance": report.chance,
        **report.details,
    }


def write(folder: Path, content: Mapping[str, Any]) -> Path:
    """Put a result at <folder>/<dataset>.json, whole or not at all."""
    from train.files import write_json

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{content['dataset']}.json"
    write_json(path, content)
    return path


def print_saved_tables(folder: Path) -> None:
    """The tables of the results that lie in `folder`."""
    print_tables([json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))])


def print_tables(results: Sequence[Mapping[str, Any]]) -> None:
    """Retrieval by data set and direction, zero-shot by data set."""
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 120)
    for task, table in (("zeroshot_retrieval", _retrieval_table), ("zeroshot_classification", _zero_shot_table)):
        found = [r for r in results if r["task"] == task]
        if found:
            console.print(table(found))


def _retrieval_table(results: Sequence[Mapping[str, Any]]) -> Any:
    from rich.table import Table

    ks = [k.removeprefix("image_to_text_R@") for k in results[0]["metrics"] if k.startswith("image_to_text_R@")]
    table = Table("retrieval", "direction", *(f"R@{k}" for k in ks), "median rank", "candidates", f"chance R@{ks[-1]}")
    for r in results:
        for direction, candidates in (("image_to_text", "num_texts"), ("text_to_image", "num_images")):
            values = [r["metrics"][f"{direction}_{m}"] for m in (*(f"R@{k}" for k in ks), "median_rank")]
            *recalls, median = values
            table.add_row(
                r["dataset"],
                direction.replace("_to_", " → "),
                *(f"{v:.3f}" for v in recalls),
                f"{median:.0f}",
                f"{r['metrics'][candidates]:.0f}",
                f"{r['chance'][f'{direction}_R@{ks[-1]}']:.3f}",
            )
    return table


def _zero_shot_table(results: Sequence[Mapping[str, Any]]) -> Any:
    from rich.table import Table

    metrics = ("acc1", "acc5", "mean_per_class_recall")
    table = Table("zero-shot", *metrics, "samples", "chance acc1", "largest class")
    for r in results:
        table.add_row(
            r["dataset"],
            *(f"{r['metrics'][m]:.3f}" if m in r["metrics"] else "-" for m in metrics),
            f"{r['metrics']['num_samples']:.0f}",
            *(f"{r['chance'][c]:.3f}" for c in ("acc1", "majority_class_share")),
        )
    return table
