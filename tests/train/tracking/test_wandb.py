"""W&B for real: an offline run read back, and servers that fail."""

import json
import os
import signal
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.report import HOSTILE, passages, scores
from helpers.wandb import hub, inspect, sent, start, steps

from dyad.train.tracking.wandb import _sent
from tests.train.tracking.test_logger import records

EVERYTHING = [(1, "train"), (2, "train"), (2, "val"), (3, "train"), (4, "train"), (4, "val"), (5, "train")]
EVERYTHING += [(6, "train"), (6, "val")]


@dataclass
class Ended:
    """An offline run of its own process: its folder, what it said, its only file."""

    folder: Path
    told: str
    file: Path

    @property
    def wandb_id(self) -> str:
        return self.told.split("id ")[1].split()[0]


@pytest.fixture(scope="module", autouse=True)
def no_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(tmp_path_factory.mktemp("home") / "netrc"))
        patch.setenv("WANDB_BASE_URL", "https://wandb.example:8080")
        yield


@pytest.fixture(scope="module")
def ended(no_key: None, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("runs") / "toy"
    run = start(folder, "offline")
    told = run.end()
    assert (run.process.returncode, run.complaints.read_text()) == (0, "")
    (file,) = files(folder)
    return Ended(folder, told, file)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/*run-*/*.wandb"), key=lambda path: path.stat().st_mtime)


def content(path: Path, name: str) -> dict:
    """The table called `name` of an artifact of a run."""
    entries = [e for artifact in sent(path, "artifact") for e in artifact["manifest"]["contents"]]
    (entry,) = [entry for entry in entries if entry["path"] == f"{name}.table.json"]
    return json.loads(Path(entry["local_path"]).read_text())


def test_an_offline_run_is_complete(ended: Ended) -> None:
    folder, file = ended.folder, ended.file
    assert ended.told.startswith(f"W&B: offline; later: wandb sync {folder}/wandb/offline-run-*\n")
    assert ended.told.count("W&B") == 1
    read = json.loads(inspect(file, "--summary"))
    assert file.parent.match(f"wandb/offline-run-*-{ended.wandb_id}")
    assert (read["run_id"], read["project"], read["name"]) == (ended.wandb_id, "toys", "toy")
    assert (read["state"], read["exit_code"]) == ("finished", 0)
    login = {"api_token": "[redacted]", "retries": 3}
    assert read["config"] == {"lr": 0.5, "login": login, "train": "https://[redacted]@host/x.tar"}
    assert read["summary"]["trainer/global_step"] == 6
    assert read["summary"]["trainer/samples_seen"] == 600
    assert read["summary"]["val/image_to_text_R@1"] == {"min": 0.2, "max": 0.6, "last": 0.6}
    assert read["summary"]["val/image_to_text_mean_rank"] == {"min": 4, "max": 8, "last": 4}
    assert steps(file) == EVERYTHING
    assert [(r["step"], "train" if "train/loss" in r else "val") for r in records(folder)] == steps(file)


def test_a_run_ends_with_what_the_report_shows(ended: Ended) -> None:
    folder, file = ended.folder, ended.file
    metrics = {m.get("name") or m["glob_name"]: m for m in sent(file, "metric")}
    assert metrics["trainer/global_step"]["options"]["hidden"]
    for group in ("train", "val", "eval", "gallery", "scores"):
        assert metrics[f"{group}/*"]["step_metric"] == "trainer/global_step"
    assert metrics["val/*"]["summary"] == {"min": True, "max": True, "last": True}

    summary = json.loads(inspect(file, "--summary"))["summary"]
    tables = {key for key, value in summary.items() if isinstance(value, dict) and value.get("_type") == "table-file"}
    galleries = {"val_picture_to_texts", "val_text_to_pictures", "groups_picture_to_classes"}
    galleries |= {"topics_question_to_passages"}
    charts = {"confusion/groups_table"}
    assert tables == {f"gallery/{name}" for name in galleries} | charts | {"classes/groups"}
    shown = {"_type": "histogram", "bins": scores()["edges"], "values": scores()["best_wrong"]}
    assert summary["scores/val_best_wrong"] == shown
    final = summary["final/val/image_to_text_R@1"]
    assert final == pytest.approx({"value": 0.1234567, "low": 0.1034567, "high": 0.1534567, "chance": 0.01})
    value = passages()["baselines"]["bm25"]["metrics"]["nDCG@10"]
    final = {"value": value, "low": 0.31, "high": 0.39, "chance": 0.000226}
    assert summary["final/topics/bm25/nDCG@10"] == final
    assert [key for key in summary if "mean_rank" in key and key.startswith("final/")] == []  # it is no score

    images = content(file, "gallery/val_text_to_pictures")
    assert images["columns"] == ["kind", "query", "rank", "right", *(f"model {i}" for i in range(1, 6))]
    best, worst, _ = images["data"]
    assert best[:4] == ["best", HOSTILE, 1, "two cups"]
    assert [cell["caption"] for cell in best[4:6]] == ["✓ 0.900 a red square", "0.800 a dog on a roof"]
    assert all(cell["_type"] == "image-file" and cell["path"].endswith(".webp") for cell in best[4:])
    assert worst[7] is not None and worst[8:] == [None]
    texts = content(file, "gallery/topics_question_to_passages")
    assert texts["columns"] == ["kind", "query", "right", "model", "bm25", "untrained"]
    assert texts["data"][0][2] == "two cups"
    first, second, *_ = texts["data"][0][3].splitlines()
    assert first.startswith(f"1. 3.000 {HOSTILE}: Before it")
    assert second.startswith("2. ✓ 2.000 Deep: Before it") and "The answer is «forty-two», " in second
    classes = content(file, "classes/groups")["data"]
    assert classes[:2] == [[HOSTILE, 0.5, 10], ["cats", 0.8, 10]] and len(classes) == 3  # one has no images
    assert content(file, "confusion/groups_table")["data"][1] == ["cats", HOSTILE, 1]

    (report,) = [artifact for artifact in sent(file, "artifact") if artifact["type"] == "report"]
    (entry,) = report["manifest"]["contents"]
    page = (folder / "report.html").read_bytes()
    assert (entry["path"], Path(entry["local_path"]).read_bytes()) == ("report.html", page)
    assert summary["report/page"]["_type"] == "html-file"
    assert (file.parent / "files" / summary["report/page"]["path"]).read_bytes() == page
    held = [e["local_path"] for a in sent(file, "artifact") for e in a["manifest"]["contents"]]
    assert all(Path(path).is_relative_to(folder) for path in held)  # the run folder has all that is still to be sent


def test_a_run_goes_on_under_its_id_and_says_nothing_twice(ended: Ended) -> None:
    folder = ended.folder
    run = start(folder, "offline", ended.wandb_id, first=4, how="kill")  # after step 5; step 6 is sent already as well
    run.end()
    assert run.process.returncode == -9
    run = start(folder, "offline", ended.wandb_id, first=4)
    run.end()
    assert (run.process.returncode, run.complaints.read_text()) == (0, "")
    assert len(files(folder)) == 3
    assert {f.name for f in files(folder)} == {f"run-{ended.wandb_id}.wandb"}
    assert [sent(f, kind) for f in files(folder)[1:] for kind in ("history", "artifact")] == [[], [], [], []]
    for path in folder.rglob("*"):
        assert path.is_dir() or b"canary-7" not in path.read_bytes(), path


@pytest.mark.linux
def test_a_tracker_that_fails_costs_seconds_and_nothing_else(tmp_path: Path) -> None:
    """Together, for time: two servers begin the run and then fall silent, or drip; one refuses the key; and W&B's own
    service is stopped dead. W&B left to itself waits 90 s at the start, 20 s for each table, for ever at the end."""
    with hub("silent") as (silent, begun), hub("drips") as (drips, dripping), hub("refuses") as (refusing, _):
        address = {"silent": silent, "drips": drips, "refusing": refusing}
        key = "k" * 40
        runs = {n: start(tmp_path / n, "online", WANDB_BASE_URL=a, WANDB_API_KEY=key) for n, a in address.items()}
        runs["frozen"] = start(tmp_path / "frozen", "offline", how="freeze")
        told = {name: run.end() for name, run in runs.items()}
    os.kill(int(told["frozen"].split("frozen ")[1].split()[0]), signal.SIGKILL)
    assert begun.is_set()
    assert dripping.is_set()
    for name, run in runs.items():
        assert run.process.returncode == 0, told[name]
        assert [r["step"] for r in records(tmp_path / name)] == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    for name in ("silent", "drips"):
        assert f"W&B: online at {address[name]}, project toys\n" in told[name]
        assert f"`wandb sync {tmp_path}/{name}/wandb/run-" in told[name]
        assert "W&B is left out from here: " in told[name]
    (file,) = files(tmp_path / "silent")
    assert steps(file) == EVERYTHING  # for `wandb sync`
    assert "W&B is left out from here: " in told["refusing"] and "[redacted]" in told["refusing"]
    secrets = [key.encode(), b64encode(f"api:{key}".encode())]
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(secret in content for secret in secrets for content in written)
    assert any(b"*" * len(secrets[1]) in content for content in written)  # it was in W&B's own log
    assert "the run has waited 24 s for it. metrics.jsonl has everything, and `wandb sync" in told["frozen"]


def test_a_place_where_w_and_b_cannot_write_costs_only_w_and_b(tmp_path: Path) -> None:
    """A file where its folder would be: what even root cannot write to."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "wandb").write_text("")
    run = start(tmp_path / "blocked", "offline")
    told = run.end()
    assert run.process.returncode == 0, told
    assert "W&B is left out from here: " in told
    assert [r["step"] for r in records(tmp_path / "blocked")] == [1, 2, 2, 3, 4, 4, 5, 6, 6]


def test_a_damaged_note_of_what_was_sent_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "sent.json").write_bytes(b"[[1, tr\xff")
    for _ in range(2):
        assert _sent(tmp_path / "sent.json", {(1, True)}) == {(1, True)}
