"""Runs of task=language_model by the command line: any number of processes, kills, LoRA, evaluation, export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import Jobs, digest
from helpers import tiny_causal
from helpers.cli import Commands
from helpers.tiny_runs import losses, records, refused
from transformers import AutoModelForCausalLM, AutoTokenizer
from ways import Way, in_ways, run_in_ways

import dyad
from dyad.data.build.weights import run as weigh
from dyad.data.cli.options import WeightsOptions

Tiny = Callable[[dict[str, Any]], list[str]]
DPM = {
    "objective": "one_sided_dpm",
    "objective.candidates": "list",
    "objective.similarity": "dot",
    "objective.temperature": 0.2,
    "data.negatives.per_row": 2,
}
NLL = {"objective": "nll", "data.negatives.per_row": 0}
LORA = {**DPM, "model.text.lora_rank": 2, "model.grad_checkpointing": True}
LOG_Q = {**DPM, "objective.importance": "log_q"}  # of the answers, right and wrong


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny language model, lm/, and rows: the letter that comes after others, and wrong letters."""
    folder, generator = tmp_path_factory.mktemp("lm"), np.random.default_rng(0)
    (folder / "lm").mkdir()
    tiny_causal.write(folder / "lm", positions=128)
    rows = []
    for _ in range(60):
        start = int(generator.integers(20))
        letters = "abcdefghijklmnopqrstuvwxyz"
        right = letters[start + 3]
        wrong = generator.permutation([letter for letter in letters if letter != right])[: 1 + start % 3]
        rows.append({"query": letters[start : start + 3], "pos": [right], "neg": [*map(str, wrong)]})
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "val.jsonl").write_text("\n".join(map(json.dumps, rows[:20])))
    weigh([str(folder / "train.jsonl")], WeightsOptions(out=str(folder / "log_q.safetensors"), add=1))
    return folder


def keys(data: Path, **own: Any) -> dict[str, Any]:
    return {
        "task": "language_model",
        "data": "question_passage",
        "model.text.name": data / "lm",
        "data.question.length": 8,
        "data.passage.length": 8,
        "global_batch_size": 10,
        "data.train": data / "train.jsonl",
        "model": "causal_lm",
        "model.embed_dim": "null",
        "model.text.kind": "transformers",
        "model.image.image_size": "null",
        "model.image.widths": [32, 64, 128, 192],
        **own,
    }


@pytest.mark.parametrize(("own", "ways"), in_ways({"dpm": DPM, "nll": NLL, "lora": LORA, "log_q": LOG_Q}))
def test_the_same_losses_on_any_number_of_processes(
    own: dict[str, Any], ways: list[Way], data: Path, jobs: Jobs
) -> None:
    given = keys(data, **{**own, "steps": 4})
    if "objective.importance" in own:
        given["objective.importance_file"] = data / "log_q.safetensors"
    run_in_ways(jobs, given, ways)


def test_half_precision_of_sharded_chunks_has_the_gradient_of_one_process(data: Path, jobs: Jobs) -> None:
    given = keys(data, **{**DPM, "steps": 2, "precision": "bf16"})
    runs = run_in_ways(jobs, given, [(1, "null", "ddp"), (2, 3, "fsdp2")], tolerance=1e-2)
    one, sharded = ([r["train/grad_norm"] for r in records(run) if "train/grad_norm" in r] for run in runs)
    assert sharded == pytest.approx(one, rel=1e-2)


def test_a_killed_run_goes_on_to_the_same_bits(data: Path, jobs: Jobs) -> None:
    given = keys(data, **{**DPM, "steps": 8, "checkpoint.every": 2, "data.workers": 1})
    killed, whole = jobs.run_killed(given, after=5), jobs.run(1, {**given, "run.name": "whole"})
    assert digest(killed) == digest(whole) and losses(killed) == losses(whole)


def test_a_run_is_evaluated_exported_and_scores(data: Path, jobs: Jobs, commands: Commands) -> None:
    given = keys(data, **{**DPM, "data.val": data / "val.jsonl", "steps": 60, "optim.lr": 0.02, "tracking.every": 20})
    run = jobs.run(1, given)
    ended = commands.run("eval", f"run={run}", "baselines=[untrained]")
    assert ended.code == 0, ended.out
    result = json.loads((run / "eval/val.json").read_text())
    metrics, before = result["metrics"], result["baselines"]["untrained"]
    assert metrics["choice_accuracy"] > before["metrics"]["choice_accuracy"] + 0.2
    assert records(run)[-1]["val/choice_accuracy"] == pytest.approx(metrics["choice_accuracy"])
    assert before["metrics"]["perplexity"] > 1 and result["gallery"]["prompt → answer"]
    assert not [name for name in records(run)[-1] if name.startswith(("uniformity", "accuracy_"))]  # of embeddings
    two = commands.world(2, "eval", f"run={run}", f"out={run}/two", "baselines=[]")
    assert [each.code for each in two] == [0, 0], two[0].out
    assert json.loads((run / "two/val.json").read_text())["metrics"] == metrics

    ended = commands.run("train.export", f"run={run}")
    assert ended.code == 0, ended.out
    folder = run / "export/causal_lm"
    answers = ["d", "z", "a longer answer"]
    scores = dyad.load(str(run)).score("abc", answers)
    assert dyad.load(str(run)).score("abc", answers[0]) == pytest.approx(
        scores[:1], abs=1e-6
    )  # one text is a list of it
    for name in (f"lm:{folder}", str(folder)):
        assert dyad.load(name).score("abc", answers) == pytest.approx(scores, abs=1e-6)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for answer, score in zip(answers, scores, strict=True):
        ids = [tokenizer.bos_token_id, *tokenizer("abc").input_ids, *tokenizer(answer).input_ids[:8]]
        labels = torch.tensor([ids]).where(torch.arange(len(ids)) > 3, -100)
        assert score == pytest.approx(-model(torch.tensor([ids]), labels=labels).loss.item(), abs=1e-5)
    foreign = commands.run("eval", f"model=lm:{data / 'lm'}", f"suite=[answers:{data / 'val.jsonl'}]", f"out={run}/of")
    assert foreign.code == 0, foreign.out
    found = json.loads((run / "of/val-2.json").read_text())["metrics"]
    assert found == pytest.approx(before["metrics"] | {k: v for k, v in found.items() if k.startswith("num_")})


def test_what_does_not_fit_is_refused_before_a_folder_is_made(
    data: Path, commands: Commands, tiny: Tiny, tmp_path: Path
) -> None:
    for own, words in [
        ({**DPM, "objective": "clip"}, ["objective=clip", "objective=nll"]),
        ({**NLL, "data.passage.length": 128}, ["data.passage.length=128"]),
        ({**NLL, "data.negatives.per_row": 1}, ["objective=nll", "data.negatives.per_row=0"]),
        ({**NLL, "data.val": data / "missing.jsonl"}, ["data.val", "missing.jsonl"]),
    ]:
        refused(commands.run(*tiny(keys(data, **own))), 2, *words)
    assert not (tmp_path / "runs").exists()
