"""report.html: it says what the files say, treats them as data, stays small, and bears a run of any age."""

import html
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import matplotlib
import pytest
from helpers.messages import raises
from helpers.report import (
    CONFIG,
    HOSTILE,
    Seen,
    case,
    found,
    item,
    passages,
    records,
    retrieval,
    seen,
    training,
    write_images,
    write_run,
    zero_shot,
)

from dyad.data.base.errors import ConfigError, HardwareError
from dyad.eval.report.gallery import cases
from dyad.eval.report.main import write_report

ROOT = Path(__file__).parents[3]
LIMIT = 5_000_000


def page_of(folder: Path, **parts: Any) -> Seen:
    return seen(write_report(write_run(folder, **parts)))


def row(result: Mapping[str, Any], metric: str) -> list[float]:
    """Value, interval and chance of a metric, as the JSON has them."""
    chance = result["chance"].get(metric)
    return [
        result["metrics"][metric],
        *(result["intervals"].get(metric) or ()),
        *([] if chance is None else [chance]),
    ]


def test_keys_that_differ_from_the_defaults_are_facts(tmp_path: Path) -> None:
    for choice, count in {"global": 0, "per_chunk": 1}.items():
        config = {**CONFIG, "model": {**CONFIG["model"], "batch_norm": choice}}
        page = write_report(write_run(tmp_path / choice, config=config)).read_text().split("config.yaml</summary>")[0]
        assert page.count(f"batch norm {choice}") == count and "adamw: lr=0.001, warmup=20" in page


def test_the_model_and_its_sides_are_said_in_words(tmp_path: Path) -> None:
    text = {**CONFIG["model"]["text"], "context_length": 1, "lower_case": True, "lora_alpha": 8.0}
    model = {**CONFIG["model"], "embed_dim": None, "shared": False, "text": text}
    lines = records(uniformity_x=-0.1, duplicates_x=0.02)
    for line in lines:
        line |= {"train/novelty_x": line["step"], "train/novelty_y": line["step"] ** 2} if "train/loss" in line else {}
    page = page_of(tmp_path / "run", config={**CONFIG, "model": model}, lines=lines).text.split("config.yaml")[0]
    for words in (
        "frozen but for its projection, context length 1, lower case, LoRA alpha 8.0; ",
        "no projection",
        "not shared",
        "image −0.10, text −2.50; 0 is one single point. Each image gets nearly the same embedding.",
        "equal twin in their batch: image 2.0%, text 0.2%.",
        "novelty train/novelty_x, train/novelty_y in metrics.jsonl.",
    ):
        assert words in page
    assert "model.text" not in page and "context_length" not in page


def test_what_the_device_did_is_said_in_words(tmp_path: Path) -> None:
    on_cpu = page_of(tmp_path / "cpu").text
    assert "memory 1.25 GiB of one process at the most" in on_cpu and "tower speed 0.201 TFLOP/s a device" in on_cpu
    assert "MFU" not in on_cpu and "profile" not in on_cpu and "Speed of the towers" in on_cpu
    gpu = {"peak_gpu_gib": 71.5, "mfu": 0.412, "copy_time": 0.0031, "launches": 12345.0, "outside_towers": 0.0666}
    gpu |= {"exposed_comm_time": 0.00215, "tflops_per_second_per_device": 407.6}
    on_gpu = page_of(tmp_path / "gpu", lines=records(**gpu)).text
    for words in (
        "memory 71.5 GiB of one GPU, the peak of the last logged steps",
        "tower speed 408 TFLOP/s a device, 41% of the peak of the device (MFU)",
        "copies 0.0031 s of a step from host to GPU",
        "profile 6.7% of a step outside the towers, 0.0022 s of a step in nothing but collectives, 12,345",
    ):
        assert words in on_gpu


def test_every_number_is_that_of_the_files(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run")
    pairs, classes, questions = retrieval(), zero_shot(), passages()
    for title, direction in (("text → image", "text_to_image"), ("image → text", "image_to_text")):
        shown = dict(page.rows[f"set-0: {title}"])
        assert {k: shown[f"R@{k}"] for k in (1, 5)} == {k: row(pairs, f"{direction}_R@{k}") for k in (1, 5)}
    assert dict(page.rows["set-0: image → text"])["median rank"] == [4.0]
    assert page.rows["set-1: image → class"] == [
        ("top-1 accuracy", row(classes, "acc1")),
        ("mean per class recall", row(classes, "mean_per_class_recall")),
        ("always the largest class", [1 / 3]),
    ]
    for metric in ("nDCG@10", "Recall@100", "MRR@10"):
        others = questions["baselines"]
        ours = [questions["metrics"][metric], *questions["intervals"][metric]]
        assert page.rows[f"set-2: {metric}"] == [
            ("this run", ours),
            *(
                (label, [others[name]["metrics"][metric], *others[name]["intervals"][metric]])
                for label, name in (("BM25", "bm25"), ("before training", "untrained"))
            ),
            ("chance", [questions["chance"][metric]]),
        ]
    assert page.rows["set-1: Worst classes"][0][1] == [0.5]
    assert page.rows["set-1: Worst classes"][0][0] == HOSTILE
    mistakes = [label for label, _ in page.rows["set-1: Most frequent mistakes"]]
    assert mistakes[:2] == [HOSTILE, HOSTILE] and len(mistakes) == 6
    for words in ("60 images, 70 texts", "0.123", "0.0002", "−0.020", "200 steps of 64 pairs in 1 min 40 s"):
        assert words in page.text
    assert "processes 2 seed 3" in page.text


def test_the_batch_of_a_sequence_model_has_sequences(tmp_path: Path) -> None:
    text = page_of(tmp_path / "run", config={**CONFIG, "task": "sequence"}).text
    assert "200 steps of 64 sequences" in text and "64 sequences over all processes" in text
    assert "sequences a second" in text and "pairs a second" not in text


def test_an_approximate_index_is_named_beside_its_numbers(tmp_path: Path) -> None:
    result = {**zero_shot(), "search": {"index": "HNSW32"}}
    result["metrics"] = {**result["metrics"], "recall_against_exact@4": 0.9375}
    text = html.unescape(write_report(write_run(tmp_path / "found", results=[result])).read_text())
    named = "approximate: index HNSW32, recall against exact@4 0.938"
    assert text.count(named) == 2  # the card of the headline, and the data set
    pairs = write_report(write_run(tmp_path / "pairs", results=[{**retrieval(), "truth": "pairs"}])).read_text()
    assert pairs.count("truth=pairs") == 2 and "right is" not in pairs
    assert "Recall against exact@K: share of the exact first K that the approximate index found." in text
    exact = write_report(write_run(tmp_path / "exact")).read_text()
    assert "approximate: index" not in exact


def test_curves_tell_their_numbers_to_who_cannot_see_them(tmp_path: Path) -> None:
    lines = [training(step) for step in range(1, 3001)]
    path = write_report(write_run(tmp_path / "run", lines=lines, results=[]))
    labels = [value or "" for tag, name, value in seen(path).attributes if (tag, name) == ("svg", "aria-label")]
    (loss,) = [label for label in labels if label.startswith("Loss")]
    assert "4.09 at step 1 to -25.9 at step 3,000" in loss
    (bound,) = [label for label in labels if label.startswith("Bound")]
    assert f"log K at {math.log(64):.4g}" in bound
    assert path.stat().st_size < 400_000  # thousands of points are drawn as hundreds


def test_whatever_the_data_say_is_text(tmp_path: Path) -> None:
    hostile = "<b onclick=x>&lt;{{ 7 * 7 }}"
    state = {"status": "failed", "step": 3, "error": HOSTILE}
    config = {**CONFIG, "experiment": HOSTILE, "data": {"train": HOSTILE, "val": [hostile]}}
    run = write_run(tmp_path / hostile.replace("/", ""), config=config, state=state)
    strange = {**zero_shot(), "dataset": "odd <i>", "source": HOSTILE, "task": "<u>", "metrics": {HOSTILE: 0.5}}
    (run / "eval" / "odd.json").write_text(json.dumps(strange))
    (run / "eval" / "torn.json").write_text("{<script>")
    (run / "eval" / "list.json").write_text('{"dataset": "list", "task": "x", "metrics": []}')
    page = seen(write_report(run))
    assert not page.tags & {"script", "b onclick", "iframe", "object", "embed", "u", "link rel=stylesheet"}
    assert not [a for a in page.attributes if a[1].startswith("on")]
    addresses = [v or "" for tag, name, v in page.attributes if name in ("src", "href", "xlink:href") and tag != "a"]
    assert all(address.startswith(("data:", "#")) for address in addresses)
    shown = HOSTILE.replace("\x01", "").strip()
    for text in (shown, hostile, "odd <i>", "torn.json cannot be read", "list.json is none of ours"):
        assert text in page.text.replace("\x01", "")
    raw = (run / "report.html").read_text()
    assert "alert(1)</script>" not in raw and "canary" not in raw
    assert "<!DOCTYPE svg" not in raw and "49" not in re.findall(r"<h1>(.*?)</h1>", raw)[0]


def test_secrets_of_the_configuration_stay_out(tmp_path: Path) -> None:
    config = {**CONFIG, "init_from": "/home/canary-9/runs/x", "data": {"train": "https://me:canary-8@host/a.tar"}}
    for run, given in (("a", CONFIG), ("b", config)):
        page = write_report(write_run(tmp_path / run, config=given)).read_text().split("config.yaml</summary>")
        assert "canary" not in page[0] and "[redacted]" in page[1] and "canary-8" not in page[1]
        assert "canary-7" not in page[1]


def test_the_data_come_with_whose_work_they_are(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", config={**CONFIG, "data": {"train": f"{ROOT}/data/samples/emoji/noto-unseen.tar"}})
    assert "samples/emoji/NOTICE.md" in page.text and "Noto Emoji by Google LLC" in page.text
    assert str(ROOT.parent) not in page.text.split("whose work this is")[0].split("Data and configuration")[-1]


def test_images_are_in_the_page_and_answers_are_marked(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run")
    images = [value or "" for tag, name, value in page.attributes if (tag, name) == ("img", "src")]
    assert len(images) >= 15 and all(p.startswith("data:image/webp;base64,UklGR") for p in images)
    assert page.text.count("✓ right") >= 6
    assert page.text.index("Drawn at random") < page.text.index("Best: where") < page.text.index("Worst: where")
    assert "text → images" in page.text and "question → passages" in page.text
    raw = (tmp_path / "run/report.html").read_text()
    assert "<mark>forty-two</mark>" in raw and "Right would have been:" in raw
    assert page.text.index("BM25", page.text.index("What is the answer?")) > 0 and "before training" in page.text


def test_a_case_is_shown_once_and_what_is_no_better_than_chance_is_muted(tmp_path: Path) -> None:
    good, poor = retrieval(), {**retrieval(), "dataset": "poor"}
    poor["intervals"] = {metric: [0.0, 1.0] for metric in poor["intervals"]}
    raw = write_report(write_run(tmp_path / "run", results=[good, poor])).read_text()
    assert raw.count('class="card muted"') == 1 and raw.count(", in the interval") == 1
    first, *_ = re.findall(r'<article class="case">.*?</article>', raw, re.DOTALL)
    of_val = raw.partition('id="set-1"')[0]
    assert of_val.count(first) == 1 and 0 < raw.index('class="glance') < raw.index(first) < raw.index('id="what"')
    assert re.search(r'<details class="fold cases"><summary>Worst', raw) and "image → text" in raw
    assert "images: " in raw


def shown(text: str, spans: list[list[int]]) -> str:
    """How an answer of this text is shown, its marked parts in brackets."""
    answer = {"id": "p", "text": text, "spans": spans, "score": 1.0, "right": True}
    ((_, view),) = cases([case("best", {"text": "?"}, {"model": [answer]}, rank=1)], Path(), "val")
    return "".join(f"[{part}]" if marked else part for part, marked in view["systems"]["this run"][0]["parts"])


def test_long_texts_are_cut_around_the_answer() -> None:
    assert shown("one two three", [[4, 7], [8, 99], [-2, 2]]) == "[on]e [two] [three]"
    assert shown("one two three", [[4, 9], [5, 7], [3, 3]]) == "one [two t]hree"
    words = " ".join(f"word{i}" for i in range(100))
    place = words.index("word60")
    late = shown(words, [[place, place + 6]])
    assert late.startswith("…word") and late.endswith("…") and "[word60]" in late and 220 < len(late) < 265
    assert set(late.strip("…").replace("[", "").replace("]", "").split()) <= set(words.split())  # no word is cut
    last = words.index("word99")
    assert shown(words, [[last, last + 6]]).endswith("[word99]")
    assert shown(words, []).startswith("word0 word1")
    assert len(shown("x" * 1000, [])) < 265


@pytest.mark.parametrize("name", ["../../../secret.webp", "/etc/hostname", "5.png", "missing.webp"])
def test_only_thumbnails_of_the_data_set_are_shown(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.webp").write_bytes(b"RIFFsecret")
    answers = [item(0, score=0.5, right=True) | {"picture": name}]
    result = {**retrieval(), "gallery": {"text → pictures": [case("random", item(1), {"model": answers}, rank=1)]}}
    page = page_of(tmp_path / "run", results=[result])
    assert "img" not in page.tags and "a red square" in page.text


def test_a_thumbnail_that_cannot_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("dyad.eval.report.gallery.open_foreign", denied)
    page = page_of(tmp_path / "run", results=[retrieval()])
    assert "img" not in page.tags and "a red square" in page.text


def test_a_large_run_stays_below_5_mb_and_says_what_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", results=[], log="going on at step 7 from x\n" * 3)
    classes = [f"class {i} <&>" for i in range(50)]
    for number in range(10):
        cases = [case("random", item(1), {"model": found(True, 1)}, rank=2)] * 12
        texts = [case("worst", item(1), {"model": found(False, 1, title="<&>" * 300)}, rank=2)] * 12
        result = {
            **zero_shot(),
            "dataset": f"set{number:02}",
            "gallery": {"text → pictures": cases, "picture → texts": texts},
        }
        if number < 2:
            result["confusion"] = {"classes": classes, "counts": [[1] * 50] * 50}
        (run / f"eval/set{number:02}.json").write_text(json.dumps(result))
        write_images(run / f"eval/set{number:02}.pictures", 96, noise=True)
    path = write_report(run)
    page = seen(path)
    assert path.stat().st_size < LIMIT
    assert "24 more cases are in eval/set07.json" in page.text and "2 more data sets below" in page.text
    assert "Histogram, matrix and cases are in eval/set09.json" in page.text
    assert len([c for c in page.rows if c.endswith("image → class")]) == 10
    assert "went on at step 7" in page.text


def test_a_run_of_any_age_and_state_has_a_page(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.yaml").write_text("task: image_text\n")
    assert "How it ended is not known" in seen(write_report(bare)).text
    running = {"status": "running", "step": 0, "total_steps": 200, "time": "2026-01-01"}
    half = page_of(tmp_path / "half", lines=records()[:7], results=[], state=running)
    assert "Not finished" in half.text and "60 of 200" in half.text and "evaluated" in half.text
    old = {k: v for k, v in retrieval().items() if k in ("dataset", "task", "metrics", "chance")}
    page = page_of(tmp_path / "old", results=[{**old, "examples": {}}], config={"objective": {"name": "gone"}})
    assert dict(page.rows["set-0: image → text"])["R@1"] == [0.1234567, 0.01]
    one = page_of(tmp_path / "one", lines=[training(10)], results=[])
    assert "Training" not in one.text.split("What was trained")[0]


def test_failures_of_the_hardware_and_restarts_are_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", results=[])
    assert "hardware failures" not in seen(write_report(run)).text
    failures = [{"step": step, "cause": HOSTILE * step, "hosts": ["n1", "n2"], "restart": 8 - step} for step in (7, 8)]
    (run / "restarts.jsonl").write_text("".join(json.dumps(failure) + "\n" for failure in failures) + "{}\n[]\n")
    page = seen(write_report(run))
    assert "hardware failures 3, restarts: 1. step 7 (n1, n2): <script>" in page.text and "step 8 (n1" in page.text
    assert "restarts.jsonl: 1 of its lines cannot be read" in page.text and "script" not in page.tags


def test_numbers_that_are_none_leave_gaps(tmp_path: Path) -> None:
    lines = records()
    lines[3]["train/loss"] = None
    lines[4]["train/grad_norm"] = math.nan
    lines[5]["train/mi_bound"] = math.inf
    torn = {**retrieval(), "metrics": {**retrieval()["metrics"], "image_to_text_R@1": None}}
    ahead = {"metrics": {"image_to_text_R@5": 0.1}, "difference": {"image_to_text_R@5": {"value": 0.5}}}
    results = [{**torn, "chance": None}, {**torn, "dataset": "b", "baselines": {"untrained": ahead}}]
    run = write_run(tmp_path / "run", lines=lines, results=results)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 210, "train/lo\n[1]\n{"no": "step"}\n')
    page = seen(write_report(run))
    assert "–" in page.text and "nan" not in page.text.lower().replace("finance", "")
    assert "Steps were skipped" in page.text


def test_the_page_is_the_same_for_the_same_run_and_nothing_else_is_left(tmp_path: Path, drawn: dict) -> None:
    run = write_run(tmp_path / "run")
    before = sorted(p.name for p in run.iterdir())
    settings = dict(matplotlib.rcParams)
    first = write_report(run).read_bytes()
    drawn.clear()
    with matplotlib.rc_context({"text.usetex": True, "font.size": 30}):  # of somebody's matplotlibrc
        assert write_report(run).read_bytes() == first
    assert dict(matplotlib.rcParams) == settings
    assert sorted(p.name for p in run.iterdir()) == sorted([*before, "report.html"])
    assert write_report(run, tmp_path / "else.html").read_bytes() == first


def test_the_command_and_its_mistakes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    code = """import runpy, sys
runpy.run_module("eval.report", run_name="__main__")
assert not {"torch", "wandb", "matplotlib.pyplot", "transformers"} & set(sys.modules)"""
    command = [sys.executable, "-W", "error", "-c", code, f"run={run}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"Written: {run}/report.html\n", "")
    with raises(ConfigError, "runs/NAME"):
        write_report(tmp_path)
    (tmp_path / "config.yaml").write_text("a: [1")
    with raises(ConfigError, "config.yaml"):
        write_report(tmp_path)
    with raises(HardwareError, "nowhere/page.html"):
        write_report(run, tmp_path / "nowhere/page.html")
