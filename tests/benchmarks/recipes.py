"""What runs of images learnt, beside the same tower untrained, and beside the pixels themselves.

    python -m tests.benchmarks.recipes runs/simclr_emoji-… [runs/…] [suite=probe:TASK.json,…]
    python -m tests.benchmarks.recipes rare=runs/rare_class-… classes=runs/classes_emoji-…

Evaluates each run on its own sets and on `suite` (default: probes of the groups of emoji). Pixels: the image shrunk
to 8 × 8 places of 3 colours, as a tower without weights. The second command ranks the rare class by its trained score,
and by its log p of a classifier of all classes. Prints rows for RESULTS.md, with 95 % intervals.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dyad.eval.encode.encoder import Encoder
from dyad.eval.metrics.auc import auc_values
from dyad.eval.metrics.bootstrap import comparison
from dyad.eval.tasks.labelled import RareClass, TrainedClasses
from dyad.evaluation.load_run import find_run, load_run
from dyad.evaluation.main import build_untrained
from dyad.evaluation.suite import build_evaluators
from dyad.train.distributed.world import World
from dyad.train.towers.tower import Tower, TwoTower

SHOWN = """view_R@1 acc1 linear_acc1 knn_acc1 auc partial_auc@0.05 image_to_text_R@1 text_to_image_R@1""".split()


def pixels(tower: Any) -> nn.Module:
    shrunk = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten())
    return Tower(shrunk, nn.Identity(), prepare=tower.prepare)


def against_classifier(rare: str, classes: str) -> None:
    """Print AUCs of the score of a rare class, of its log p by a classifier, and their paired difference."""
    ranker, classifier = (load_run(*find_run(path)) for path in (rare, classes))
    scored: Any = next(e for e in build_evaluators(ranker.config, ranker.model) if isinstance(e, RareClass))
    classified: Any = next(
        e for e in build_evaluators(classifier.config, classifier.model) if isinstance(e, TrainedClasses)
    )
    values = scored._values(Encoder.of(ranker.config, ranker.model, World()))
    encode = Encoder.of(classifier.config, classifier.model, World())
    logits = torch.from_numpy(encode("x", scored.data.items) @ classified._weights(encode).T).double()
    log_p = (logits / (classifier.calibration.temperature if classifier.calibration else 1.0)).log_softmax(1).numpy()
    log_p = log_p[:, list(classified.classes).index(scored.rare)]
    limits = {"auc": 1.0, "partial_auc@0.05": 0.05}
    others = {name: auc_values(log_p, scored.positive, limit) for name, limit in limits.items()}
    found = comparison({name: values[name] for name in limits}, others, lambda _: range(len(log_p)))
    for name in limits:
        row = f"{values[name].mean():.3f} against {found['metrics'][name]:.3f}"
        low, high = found["difference"][name]["interval"]
        print(f"{rare} | {name} | {row} | {found['difference'][name]['value']:+.3f} [{low:.3f}, {high:.3f}]")


def main() -> None:
    given = dict(word.split("=", 1) for word in sys.argv[1:] if word.startswith(("suite=", "rare=", "classes=")))
    if "rare" in given:
        against_classifier(given["rare"], given["classes"])
        return
    suite = given.get("suite", "probe:data/samples/emoji/groups.json").split(",")
    for path in (word for word in sys.argv[1:] if not word.startswith("suite=")):
        run = load_run(*find_run(path))
        config = replace(run.config, eval=replace(run.config.eval, suite=[*run.config.eval.suite, *suite]))
        towers, before = run.model.towers, build_untrained(config).towers
        plain = TwoTower(pixels(towers.x_tower), pixels(towers.x_tower))
        made = {"trained": towers, "untrained": before, "pixels": plain}
        encoders = {name: Encoder.of(config, replace(run.model, towers=of), World()) for name, of in made.items()}
        for evaluator in build_evaluators(config, run.model):
            for name, encode in encoders.items():
                takes_pixels = "view" in evaluator.name or evaluator.source.startswith(("probe:", "views:"))
                takes_pixels |= config.task == "views"
                if name == "pixels" and not takes_pixels:
                    continue
                report = evaluator.report(encode, 0)
                found = {metric: report.metrics[metric] for metric in SHOWN if metric in report.metrics}
                intervals = report.details.get("intervals", {})
                text = ", ".join(
                    f"{metric} {value:.3f}"
                    + (" [{:.3f}, {:.3f}]".format(*intervals[metric]) if metric in intervals else "")
                    for metric, value in found.items()
                )
                print(f"{path} | {evaluator.name} | {name} | {text}", flush=True)


if __name__ == "__main__":
    main()
