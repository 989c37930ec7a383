"""The Weights & Biases tracker: one W&B run per training run, continued under its id, with the panels of report.html.

Records carry a step metric of our own, AXIS, instead of step=, because W&B drops lower steps after a resume. All files
that stay are in the run folder. W&B's service process may outlive a run by FINISH seconds when its server does not
answer.
"""

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dyad.data.base.files import open_foreign, write_json
from dyad.data.base.json_text import read_json
from dyad.data.base.secrets import known_secrets, without_credentials, without_secrets
from dyad.train.config import TrackingConfig, Wandb
from dyad.train.tracking.background import CLEAN_UP, TrackedRun, Tracker
from dyad.train.tracking.panel_types import Cell, Grid, Panels, Thumbnail
from dyad.train.tracking.progress import WHEN, Record, RecordPosition, position
from dyad.train.tracking.wandb_mode import PROBE, answers, server, set_up_wandb, wandb_mode

START, FINISH = 10.0, 12.0  # seconds that W&B itself waits for its server
AXIS = "trainer/global_step"
GROUPS = ("train", "val", "eval", "gallery", "scores", "confusion", "classes", "report")  # sections of the dashboard


class WandbRun(Tracker):
    """The W&B tracker: starts or continues one W&B run, online or offline as `run.config.wandb` says.

    The constructor waits up to START seconds for the server, sets WANDB_DATA_DIR, and removes secrets from the
    configuration that it sends. Records that W&B has from before a resume are not sent again.
    """

    def __init__(self, run: TrackedRun) -> None:
        folder = self._folder = run.folder / "wandb"
        clean_logs(folder)
        os.environ["WANDB_DATA_DIR"] = str(folder.resolve())  # W&B stages tables and the report here
        self._wandb = set_up_wandb()
        self._run = self._wandb.init(
            project=run.config.project,
            name=run.folder.name,
            id=run.wandb_id,
            resume="allow",
            mode=run.config.wandb.value,
            dir=str(run.folder),
            config=without_secrets(run.run_config, by_name=True),
            settings=self._wandb.Settings(
                silent=True,
                console="off",
                init_timeout=START,
                finish_timeout=FINISH,
                finish_timeout_raises=True,
                login_timeout=START,
                disable_code=True,
                x_disable_meta=any(without_credentials(a) != a for a in sys.argv),  # the metadata has the command line
            ),
        )
        self.where = self._run.url or ""
        self.recovery = f"`wandb sync {self._run.settings.sync_dir}` sends what W&B has"
        self._sent = _sent(folder / f"sent-{run.wandb_id}.json", run.taken_back)
        self._concluded = folder / f"concluded-{run.wandb_id}.json"
        self._at: dict[str, float] = {AXIS: run.first_step}
        self._run.define_metric(AXIS, hidden=True)
        for group in ("trainer", *GROUPS):
            summary = "min,max,last" if group in ("val", "eval") else None
            self._run.define_metric(f"{group}/*", step_metric=AXIS, summary=summary)

    @staticmethod
    def is_on(config: TrackingConfig) -> bool:
        return wandb_mode(config) is not Wandb.disabled

    @staticmethod
    def clean_up(folder: Path) -> None:
        """Stop W&B's service process, for which our process would otherwise wait at exit, and clean W&B's logs.

        Takes at most CLEAN_UP seconds for the service. folder: the run folder.
        """

        def tear_down() -> None:
            with suppress(Exception):
                sys.modules["wandb"].teardown()

        thread = threading.Thread(target=tear_down, daemon=True)
        thread.start()
        thread.join(CLEAN_UP)
        clean_logs(folder / "wandb")

    def log(self, record: Record) -> None:
        self._at = {AXIS: record["step"], **{f"trainer/{name}": record[name] for name in WHEN[1:]}}
        if position(record) in self._sent:
            return
        self._run.log({**{k: v for k, v in record.items() if k not in WHEN}, **self._at})

    def conclude(self, panels: Sequence[Panels], report: Path | None) -> None:
        """Send the panels of the last evaluation and report.html to W&B.

        panels: one Panels (tables, histograms) for each data set. report: path of report.html, None if it was not made.
        When a finished run is started again, nothing is sent a second time. Raises TimeoutError when the server does
        not answer.
        """
        if _read(self._concluded) == self._at[AXIS]:
            return
        if not (self._run.offline or answers(server(), PROBE)):  # W&B would ask it for 20 s
            raise TimeoutError("its server is silent")
        drawn: dict[str, Any] = {}
        for shown in panels:
            drawn |= self._drawn(shown)
            final = {f"final/{shown.dataset}/{metric}": dict(numbers) for metric, numbers in shown.final.items()}
            self._run.summary.update(final)
        if report is not None:
            drawn["report/page"] = self._wandb.Html(str(report), inject=False)
            artifact = self._wandb.Artifact(f"report-{self._run.id}", type="report", metadata=dict(self._at))
            artifact.add_file(str(report), name="report.html", skip_cache=True)
            self._run.log_artifact(artifact)
        self._run.log({**drawn, **self._at})
        write_json(self._concluded, self._at[AXIS])

    def _drawn(self, shown: Panels) -> dict[str, Any]:
        """Convert the panels of one data set to W&B objects (tables, histograms, plots) by dashboard key."""
        name = shown.dataset
        drawn = {f"gallery/{name}_{title}": self._table(table) for title, table in shown.galleries.items()}
        for kind, (edges, counts) in shown.histograms.items():
            drawn[f"scores/{name}_{kind}"] = self._wandb.Histogram(np_histogram=(counts, edges))
        if mistakes := shown.confusion:
            fields = dict(zip(("Actual", "Predicted", "nPredictions"), mistakes.columns, strict=True))
            drawn[f"confusion/{name}"] = self._wandb.plot.plot_table(
                "wandb/confusion_matrix/v1", self._table(mistakes), fields, {"title": f"{name}: confusion"}
            )
        if shown.classes:
            drawn[f"classes/{name}"] = self._table(shown.classes)
        return drawn

    def _table(self, table: Grid) -> Any:
        rows = [[self._cell(cell) for cell in row] for row in table.rows]
        return self._wandb.Table(columns=list(table.columns), data=rows, allow_mixed_types=True)

    def _cell(self, cell: Cell) -> Any:
        return self._wandb.Image(str(cell.path), caption=cell.caption) if isinstance(cell, Thumbnail) else cell

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        clean_logs(self._folder)


def clean_logs(folder: Path) -> None:
    """Overwrite secrets in W&B's own log files, which may contain text from the W&B server, with asterisks.

    folder: W&B's folder in the run folder. Files are changed in place, as W&B may still be writing. A file that cannot
    be read or written is passed over.
    """
    for path in folder.glob("*run-*/logs/*.log"):
        with suppress(OSError):
            with open_foreign(path, folder=folder) as file:
                content = clean = file.read()
            for secret in map(str.encode, known_secrets()):
                clean = clean.replace(secret, b"*" * len(secret))
            if clean != content:
                with path.open("r+b") as log:
                    log.write(clean)


def _sent(path: Path, taken_back: set[RecordPosition]) -> set[RecordPosition]:
    """Add the record positions `taken_back` to those in the JSON file `path`, save the file, and return them all.

    A position is (step, whether it is a record of training). W&B already has these records, and the resumed run will
    log them again, so they must not be sent twice. The file keeps them over several resumes of a run.
    """
    before = {(step, training) for step, training in _read(path) or ()}
    write_json(path, sorted(before | taken_back))
    return before | taken_back


def _read(path: Path) -> Any:
    """Return the parsed content of a JSON file, None if it does not exist or is damaged."""
    with suppress(OSError, ValueError):
        return read_json(path)
    return None
