"""Ranks of one job as worlds of 1 to 3: everything must have the bits of the world of 1. Writes FOLDER/RANK.json.

The evaluators report in worlds of 1 and 3; with the argument "all" in that of 2, too, and all by loader processes.
"""

import hashlib
import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from helpers.eval import Rows, Shown, encoder, random_images, tokenize, unit_rows

from dyad.data.image_text.items import Captions, LabelledSet, RetrievalSet
from dyad.eval.search import ranks
from dyad.eval.search.ranks import count_ranks
from dyad.eval.tasks.image_text_retrieval import Retrieval, match_pairs
from dyad.eval.tasks.probe import Probe
from dyad.eval.tasks.zero_shot import ZeroShot
from dyad.train.distributed.world import World
from dyad.train.eval_config import Truth


def main() -> None:
    ranks.STRIP = 700
    dist.init_process_group("gloo")
    me = dist.get_rank()
    found: dict[int, list[Any]] = {}
    metrics: dict[int, list[Any]] = {}
    told: dict[int, list[Any]] = {}
    whole = "all" in sys.argv
    shown: Any = Shown(random_images(100))
    own = np.arange(100) % 40
    words = Captions([f"{chr(97 + i % 26)} {i}" for i in range(100)], tokenize)
    labels = LabelledSet(shown, [str(i % 4) for i in own], np.arange(100))
    evaluators = [
        Retrieval("val", "", RetrievalSet(shown, words, np.arange(100), own, own)),
        *(
            Retrieval("val", "", RetrievalSet(shown, words, np.arange(100), own, own), index=spec)
            for spec in ("IVF4,Flat", "HNSW32", "PQ4x4np")
        ),
        Probe("probe", "", labels, [str(i) for i in range(4)], labels, "x", k=5),
        ZeroShot(
            "zs", "", LabelledSet(shown, [str(i) for i in own], own), {str(i): [f"{i}"] for i in range(40)}, tokenize
        ),
    ]
    evaluators.append(replace(evaluators[-1], index="IVF2,Flat"))
    for size in (1, 2, 3):
        group: Any = dist.new_group(range(size))
        if me >= size:
            continue
        world = World(rank=me, size=size, device=torch.device("cpu"), group=group)
        encode = encoder(world=world, workers=size - 1)
        count: list[int] = []
        encode.towers["x"].register_forward_hook(lambda *_, count=count: count.append(1))
        images = encode("x", Rows(random_images(97)[np.arange(100) % 97]))
        assert np.array_equal(images[97:], images[:3])
        matches, _ = match_pairs(np.arange(100), own, own, Truth.keys)
        ranking = count_ranks(images, unit_rows(100, 8, 1), matches, world)
        found[size] = [len(count), *(hashlib.sha256(a.tobytes()).hexdigest() for a in (images, *ranking))]
        if size != 2 or whole:
            by_loaders = len(evaluators) if whole else 1
            reports = [e.report(encode, 3) for e in evaluators[:by_loaders]]
            reports += [e.report(replace(encode, workers=0), 3) for e in evaluators[by_loaders:]]
            metrics[size] = [report.metrics for report in reports]
            told[size] = [report.details for report in reports]
    with open(f"{sys.argv[1]}/{me}.json", "w") as file:
        json.dump([found, metrics, told], file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
