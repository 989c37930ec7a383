"""A run of question_passage as training leaves it, without training: a tiny BERT, and what it is evaluated on."""

from __future__ import annotations

import json
import random
from pathlib import Path

import ir_measures
import torch

from dyad.eval.metrics.trec import Qrels, Run
from dyad.train.cli.compose import compose_config
from dyad.train.config import TrainConfig
from dyad.train.losses import build_objective
from dyad.train.run_folder.checkpoint_state import capture
from dyad.train.run_folder.folder import open_run
from dyad.train.run_folder.saving import write_checkpoint
from dyad.train.towers.build import build_model
from helpers import tiny_bert

WORDS = (
    "anchor bridge candle desert engine forest garden harbor island jacket kettle ladder market needle orchard".split()
)


def make_run(folder: Path, *overrides: str, seed: int = 0) -> Path:
    """A run of a tiny BERT with random weights, both sides one encoder, its checkpoint at step 7."""
    folder.mkdir(exist_ok=True)
    tiny_bert.write(folder / "bert")
    config = compose_config(
        [
            "task=question_passage",
            "model=encoder",
            "data=question_passage",
            f"model.text.name={folder / 'bert'}",
            "steps=7",
            "data.train=unused",
            "data.workers=0",
            "eval.block=8",
            "run.name=tiny",
            f"run.dir={folder / 'runs'}",
            *overrides,
        ]
    )
    run = open_run(config)
    save_checkpoint(run, config, seed)
    return run


def save_checkpoint(run: Path, config: TrainConfig, seed: int) -> Path:
    """Write the checkpoint of step 7: the weights at the start of the run plus noise, as if trained."""
    torch.manual_seed(seed)
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.towers.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    objective = build_objective(config.objective.name)
    optimizer = torch.optim.AdamW(model.towers.parameters())
    return write_checkpoint(run, capture({"towers": model.towers, "objective": objective}, optimizer, 7, {}), keep=3)


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def write_beir(folder: Path, passages: int = 30, questions: int = 12) -> Path:
    """Graded judgements of questions in four topics. p0 and p1 have one text; d3 is a question and a passage.

    q5 has no words in common with any passage; p7 is judged wrong (grade 0) for q0; the last question has no right
    passage, so it is judged and not asked.
    """
    rng = random.Random(0)
    texts = [sentence(rng, 8) for _ in range(passages)]
    texts[1] = texts[0]
    corpus = [{"_id": f"p{i}", "title": WORDS[i % 5], "text": text} for i, text in enumerate(texts)]
    corpus[3]["_id"] = "d3"
    queries = [
        {"_id": f"q{i}", "text": sentence(rng, 3), "metadata": {"topic": f"topic {i % 4}"}} for i in range(questions)
    ]
    queries[3] |= {"_id": "d3", "text": texts[3]}
    queries[5]["text"] = "zzz qqq"
    judged = [
        (q["_id"], corpus[rng.randrange(passages)]["_id"], rng.randint(1, 3)) for q in queries[:-1] for _ in range(2)
    ]
    judged.append((queries[-1]["_id"], "p2", 0))
    judged.append(("q0", "p7", 0))
    judged = [entry for entry in judged if entry[:2] != ("d3", "d3")]
    (folder / "qrels").mkdir(parents=True)
    _lines(folder / "corpus.jsonl", corpus)
    _lines(folder / "queries.jsonl", queries)
    for split, part in (("test", judged), ("dev", judged[:6])):
        unique = dict(((q, p), g) for q, p, g in part)
        rows = "".join(f"{q}\t{p}\t{g}\n" for (q, p), g in unique.items())
        (folder / "qrels" / f"{split}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{rows}")
    return folder


def _lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def read_run(path: Path) -> Run:
    """Read a TREC run: query id → document id → score."""
    run: Run = {}
    for scored in ir_measures.read_trec_run(str(path)):
        run.setdefault(scored.query_id, {})[scored.doc_id] = scored.score
    return run


def read_qrels(path: Path) -> Qrels:
    """Read judgements of TREC or BEIR (.tsv): query id → document id → grade."""
    qrels: Qrels = {}
    for line in path.read_text().splitlines():
        query, *_, document, grade = line.split("\t" if path.suffix == ".tsv" else None)
        if grade != "score":
            qrels.setdefault(query, {})[document] = int(grade)
    return qrels
