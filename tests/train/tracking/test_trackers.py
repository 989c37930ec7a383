"""Trackers are settled before anything starts, kept from holding up a run; TensorBoard."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import pytest
from helpers import report
from helpers.messages import raises

from dyad.data.base.errors import ConfigError
from dyad.train.config import TrackingConfig, Wandb
from dyad.train.tracking import background, wandb_mode as wandb_mode_module
from dyad.train.tracking.background import BackgroundTracker, TrackedRun, Tracker
from dyad.train.tracking.logger import build_logger
from dyad.train.tracking.panel_types import Panels
from dyad.train.tracking.trackers import TRACKERS, check_tracking
from dyad.train.tracking.wandb_mode import resolve_wandb_mode, wandb_mode
from tests.train.tracking.test_logger import ROOT, schedule, training


@pytest.fixture
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example:8080")
    return tmp_path / "netrc"


def test_the_mode_of_wandb_is_known_before_anything_starts(no_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mode(wanted: Wandb) -> str:
        return wandb_mode(TrackingConfig(wandb=wanted)).name

    assert [mode(m) for m in (Wandb.auto, Wandb.offline, Wandb.disabled)] == ["disabled", "offline", "disabled"]
    with raises(ConfigError, "tracking.wandb=online"):
        check_tracking(TrackingConfig(wandb=Wandb.online))
    no_key.write_text("machine wandb.elsewhere login user password abc\n")
    assert mode(Wandb.auto) == "disabled"
    no_key.write_text("machine wandb.example:8080 login user password abc\n")
    assert mode(Wandb.auto) == "online"
    no_key.write_text("not a netrc")
    assert mode(Wandb.auto) == "disabled"
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert [mode(m) for m in Wandb] == ["online", "online", "offline", "disabled"]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert [mode(m) for m in Wandb] == ["disabled", "online", "offline", "disabled"]


def test_the_decision_is_one_line(no_key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(wanted: Wandb) -> str:
        told: list[str] = []
        assert resolve_wandb_mode(TrackingConfig(wandb=wanted), tmp_path, told.append).wandb is not Wandb.auto
        return "\n".join(told)

    later = f"; later: wandb sync {tmp_path}/wandb/offline-run-*"
    assert line(Wandb.auto) == ""
    assert line(Wandb.offline) == f"W&B: offline{later}"
    assert line(Wandb.disabled) == ""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert line(Wandb.auto) == ""
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert line(Wandb.auto) == f"W&B: offline (WANDB_MODE){later}"


def test_wandb_has_other_names_for_its_modes(no_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    for named, mode in (("dryrun", Wandb.offline), ("run", Wandb.online), ("shared", Wandb.online), ("", Wandb.online)):
        monkeypatch.setenv("WANDB_MODE", named)
        assert wandb_mode(TrackingConfig()) is mode
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with raises(ConfigError, "WANDB_MODE=ofline", "tracking.wandb"):
        wandb_mode(TrackingConfig())
    assert wandb_mode(TrackingConfig(wandb=Wandb.offline)) is Wandb.offline


def test_a_package_that_does_not_load_is_said_and_left(no_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setitem(sys.modules, "wandb", None)
    told: list[str] = []
    assert resolve_wandb_mode(TrackingConfig(), Path("run"), told.append).wandb is Wandb.disabled
    assert len(told) == 1
    assert told[0].startswith("W&B: disabled (the package does not load: import of wandb halted")


def test_a_package_that_does_not_load_leaves_the_keys_of_the_cloud(
    no_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings, which name the server, cannot be read. A key of another host is none."""
    monkeypatch.delenv("WANDB_BASE_URL")
    monkeypatch.setitem(sys.modules, "wandb", None)
    for host, mode in (("github.com", Wandb.disabled), ("api.wandb.ai", Wandb.online)):
        no_key.write_text(f"machine {host} login user password abc\n")
        assert wandb_mode(TrackingConfig()) is mode


@pytest.mark.parametrize("listens", [True, False])
def test_a_server_that_does_not_answer_means_offline(
    listens: bool, no_key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_mode_module, "PROBE", 0.2)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    told: list[str] = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:  # and never accepts
            server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", url.replace("//", "//me:pass@") if listens else url)
        assert resolve_wandb_mode(TrackingConfig(wandb=Wandb.online), tmp_path, told.append).wandb is Wandb.offline
    shown = url.replace("//", "//[redacted]@") if listens else url
    assert told == [
        f"W&B: offline ({shown} does not answer within 0 s); later: wandb sync {tmp_path}/wandb/offline-run-*"
    ]


class Toy(Tracker):
    """A Tracker that keeps what it is told, until it comes to `stuck` (never returns) or `broken` (raises)."""

    where, recovery = "behind the door", "the rest is under the mat"

    def __init__(self, stuck: str = "", broken: str = "") -> None:
        self.stuck, self.broken, self.told = stuck, broken, []
        self._act("start")

    @staticmethod
    def is_on(config: TrackingConfig) -> bool:
        return True

    def log(self, record: Mapping[str, float]) -> None:
        self._act(f"log {record['step']}")

    def conclude(self, panels: Sequence[Panels], report: Path | None) -> None:
        self._act("conclude")

    def close(self, failed: bool) -> None:
        self._act("close")

    def _act(self, what: str) -> None:
        if what == self.stuck:
            threading.Event().wait()
        if what == self.broken:
            raise OSError("it fell over.\nand more")
        self.told.append(what)


def guest_told(start: Callable[[], Toy]) -> list[str]:
    """What a run with this tracker says."""
    lines: list[str] = []
    guest = BackgroundTracker("Toy", start, lines.append, lambda: lines.append("left"))
    for step in range(3):
        guest.log({"step": step})
    guest.conclude([], None)
    guest.close(failed=False)
    return lines


def test_a_tracker_is_told_everything_in_order() -> None:
    toy = Toy()
    assert guest_told(lambda: toy) == ["Toy: behind the door"]
    assert toy.told == ["start", "log 0", "log 1", "log 2", "conclude", "close"]


def test_a_row_of_the_table_is_a_tracker_of_every_run_that_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Toy] = []

    class Row(Toy):
        def __init__(self, run: TrackedRun) -> None:
            super().__init__()
            assert (run.folder, run.first_step) == (tmp_path, 3)
            made.append(self)

        @staticmethod
        def is_on(config: TrackingConfig) -> bool:
            return config.project == "toys"

    monkeypatch.setitem(TRACKERS, "Toy", Row)
    for project in ("toys", "none"):
        config = TrackingConfig(wandb=Wandb.disabled, project=project)
        with build_logger(tmp_path, config, schedule(3), {}) as logger:
            logger.log(4, training(1.0))
    assert [toy.told for toy in made] == [["start", "log 4", "close"]]


@pytest.mark.parametrize("where", ["start", "log 1", "conclude", "close"])
def test_a_tracker_that_is_stuck_or_broken_is_left_once(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "TIMEOUT", 0.2)
    greeting, rest = (["Toy: behind the door"], ", and the rest is under the mat") if where != "start" else ([], "")
    for toy, reason in ((Toy, "the run has waited 0 s for it"), (Toy, "it fell over")):
        options = {"stuck": where} if "waited" in reason else {"broken": where}
        lines = [*greeting, f"Toy is left out from here: {reason}. metrics.jsonl has everything{rest}", "left"]
        assert guest_told(lambda toy=toy, options=options: toy(**options)) == lines


def test_a_tracker_that_lags_far_behind_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "QUEUE_SIZE", 2)
    monkeypatch.setattr(background, "TIMEOUT", 60.0)
    _, line, left = guest_told(lambda: Toy(stuck="log 0"))
    assert line.startswith("Toy is left out from here: it lags 2 records behind. metrics.jsonl has everything")
    assert left == "left"


TOPICS = "topics/question_to_passages"


def test_tensorboard_shows_the_run_once_and_how_it_ended(tmp_path: Path) -> None:
    import_module("tensorboard")
    code = """
import json, sys
from pathlib import Path
from dyad.eval.results.panels import panels
from tests.helpers.report import finished
from tests.train.tracking.test_logger import schedule, training
from dyad.train.config import TrackingConfig, Wandb
from dyad.train.tracking.logger import build_logger
folder = Path(sys.argv[1])
for first, last in ((0, 5), (2, 6)):
    config = TrackingConfig(wandb=Wandb.disabled, tensorboard=True)
    logger = build_logger(folder, config, schedule(first), {})
    for step in range(first + 1, last + 1):
        logger.log(step, training(step))
    if last == 6:
        results, report = finished(folder)
        logger.conclude([panels(result, folder) for result in results], report)
    logger.close()
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(str(folder / "tensorboard"))
events.Reload()
tags = events.Tags()
(scores,) = events.Histograms("scores/val_best_wrong")
print(json.dumps([
    [(e.step, e.value) for e in events.Scalars("train/loss")], tags["histograms"], tags["tensors"], scores.step,
    scores.histogram_value.bucket_limit, scores.histogram_value.bucket, tags["images"],
    {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags["tensors"]},
]))
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"TensorBoard: tensorboard --logdir {tmp_path}/tensorboard" in run.stdout
    loss, histograms, texts, *scores, images, tables = json.loads(run.stdout.splitlines()[-1])
    galleries = ("val/picture_to_texts", "val/text_to_pictures", "groups/picture_to_classes")
    assert texts == [f"{tag}/text_summary" for tag in (*galleries, "groups/confusion", "groups/classes", TOPICS)]
    assert {"val/picture_to_texts/1 query", "val/text_to_pictures/1 model 1"} <= {*images}
    shown = tables["val/picture_to_texts/text_summary"]
    assert "| two cups |" in shown and "<script>" not in shown and "&lt;script&gt;" in shown
    assert loss == [[step, float(step)] for step in range(1, 7)]
    kinds, sets = ("right", "wrong", "best_wrong"), ("val", "groups", "topics")
    assert histograms == [f"scores/{dataset}_{kind}" for dataset in sets for kind in kinds]
    given = report.scores()
    assert scores == [6, given["edges"], [0, *given["best_wrong"]]]


def test_tensorboard_that_is_not_installed_is_said_at_once() -> None:
    code = """
import sys
sys.modules["tensorboard"] = None
from dyad.train.config import TrackingConfig, Wandb
from dyad.train.tracking.trackers import check_tracking
check_tracking(TrackingConfig(wandb=Wandb.disabled, tensorboard=True))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "ConfigError: tracking.tensorboard=true needs the package" in run.stderr
