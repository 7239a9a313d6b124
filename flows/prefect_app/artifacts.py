"""Artifacts on Prefect's page: progress, metrics and the run's location."""

import base64
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from httpx import TransportError
from prefect import get_client, get_run_logger
from prefect.artifacts import (
    create_image_artifact,
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
)
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.events import emit_event
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from metaloom import storage
from metaloom.flows.formatting import adaptation_returns, duration, finite, number, plural, speed, stage_name
from metaloom.flows.observer import IterationReport
from metaloom.flows.prefect_app.reports import address_of
from metaloom.flows.results.class_returns import classes_text, headline_returns, named_estimates
from metaloom.flows.results.evaluation import EvaluationOutcome
from metaloom.flows.results.replay import StageReplay
from metaloom.flows.runs import report_folder
from metaloom.flows.views.charts import rendered
from metaloom.flows.views.history import load_history
from metaloom.flows.views.report import ReportFiles, learning_curve, write_report

# Training waits for the server's answers. If none comes within ANSWER_SECONDS, nothing is sent for QUIET_SECONDS.
ANSWER_SECONDS, QUIET_SECONDS = 10.0, 30.0

Cell = str | int | float | None

# Writing an artifact blocks training for about 10 ms, and every update of a table adds a version. Drawing a curve takes
# longer, and increasingly so as the number of iterations grows.
PROGRESS_SECONDS = 5.0
METRICS_SECONDS = 30.0
CURVE_SECONDS = 60.0
ITERATION_DONE = "metaloom.iteration.done"  # name of the event emitted after each iteration, for automations


class TrainingPage:
    """Publisher of a training flow run's artifacts.

    Artifact keys are derived from the run's name, so a run that continues in another flow run updates its artifacts.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock, self._logger = folder.resolve(), clock, get_run_logger()
        self._updated: dict[str, float] = {}
        self._created: dict[str, UUID] = {}
        self._is_troubled, self._quiet_until = False, -math.inf

    def open(self, also: Callable[[], None] = lambda: None) -> None:
        """Publish the run's location before training; `also` sends further data to Prefect."""

        def show() -> None:
            also()
            self._publish_summary(None)

        self._report(show)

    def iteration_done(self, report: IterationReport) -> None:
        """Log and publish a completed iteration; callback for an Observer."""
        self._logger.info(iteration_line(report))
        name, metrics = self._folder.name, {name: finite(value) for name, value in report.metrics.items()}
        key = f"metaloom.run.{artifact_key('run', name)[4:]}"
        about: dict[str, Any] = {"iteration": report.iteration, "iterations": report.iterations, "metrics": metrics}
        about["evaluation_returns"] = [finite(value) for value in report.evaluation_returns]
        emit_event(ITERATION_DONE, {"prefect.resource.id": key, "prefect.resource.name": name}, payload=about)
        self._report(lambda: self._show(report))

    def close(self) -> None:
        """Publish the learning curve and the report of the finished run."""
        run = storage.open_run(self._folder)
        if not run.iterations:
            return
        files = write_report(run, report_folder(self._folder))

        def show() -> None:
            self._publish_curve()
            self._publish_summary(files)

        self._report(show, always=True)

    def _report(self, show: Callable[[], None], *, always: bool = False) -> None:
        """Call `show`, except soon after a connection error unless `always` is True; log the first failure."""
        if self._clock() < self._quiet_until and not always:
            return
        try:
            # Prefect's client would retry for a minute, blocking training.
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: ANSWER_SECONDS}):
                show()
        except Exception as error:
            if isinstance(error, TransportError):
                self._quiet_until = self._clock() + QUIET_SECONDS
            if not self._is_troubled:
                self._is_troubled = True
                problem = str(error) or type(error).__name__
                self._logger.warning("The page does not show all of this run, which continues: %s", problem)

    def _show(self, report: IterationReport) -> None:
        last = report.iteration + 1 >= report.iterations
        if last or self._is_due("progress", PROGRESS_SECONDS):
            percent = 100 * (report.iteration + 1) / report.iterations
            self._publish("progress", create_progress_artifact, percent, iteration_line(report))
        if last or self._is_due("metrics", METRICS_SECONDS):
            key, rows = artifact_key("metrics", self._folder.name), [*table_of(report.metrics), *_class_table(report)]
            when = f"iteration {report.iteration}, {duration(report.elapsed_seconds)} after the start"
            create_table_artifact(rows, key=key, description=f"Metrics of {when}")
        # An iteration becomes visible shortly after it is done, so there may be none yet; `close` draws the last one.
        if not last and storage.open_run(self._folder).iterations and self._is_due("curve", CURVE_SECONDS):
            self._publish_curve()

    def _is_due(self, what: str, seconds: float) -> bool:
        now = self._clock()
        if due := now - self._updated.get(what, -math.inf) >= seconds:
            self._updated[what] = now
        return due

    def _publish_curve(self) -> None:
        image = curve_of(storage.open_run(self._folder))
        self._publish("curve", create_image_artifact, image, "Learning curve")

    def _publish(self, what: str, create: Callable[..., object], data: float | str, description: str) -> None:
        """Create an artifact, or update the one that this flow run has already created."""
        if (known := self._created.get(what)) is not None:
            with get_client(sync_client=True) as client:
                client.update_artifact(known, ArtifactUpdate(data=data, description=description))
            return
        created = create(data, key=artifact_key(what, self._folder.name), description=description)
        assert isinstance(created, UUID), "only callers in an event loop get a coroutine"
        self._created[what] = created

    def _publish_summary(self, report: ReportFiles | None) -> None:
        name, about = self._folder.name, "Location of the run, and commands to inspect it"
        create_markdown_artifact(summary(self._folder, report), key=artifact_key("summary", name), description=about)
        if report is not None and (address := address_of(self._folder, report.html.name)) is not None:
            create_link_artifact(address, f"Report of {name}", key=artifact_key("report", name), description="Report")


def publish_replay(folder: Path, outcomes: Sequence[StageReplay]) -> None:
    """Publish a table of the replayed stages, with a row per array that differs."""
    rows: list[dict[str, Cell]] = []
    for outcome in outcomes:
        stage = f"i={outcome.ref.iteration} {stage_name(outcome.ref)}"
        if outcome.identical:
            rows.append({"stage": stage, "result": outcome.proved})
        for d in outcome.differences:
            row = {"stage": stage, "result": "differs", "array": d.array, "first index": str(list(d.index))}
            rows.append({**row, "stored": d.stored, "replayed": d.replayed, "max ulp": d.max_ulp})
    # All rows need the same columns, since the page only shows the columns of the first row.
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = [{name: row.get(name) for name in columns} for row in rows]
    create_table_artifact(table, key=artifact_key("replay", folder.name), description=f"Replay of {folder}")


def publish_evaluation(folder: Path, outcome: EvaluationOutcome) -> None:
    """Publish a table of returns per number of adaptation steps."""
    create_table_artifact(
        [{name: shown(value) for name, value in row.columns.items()} for row in outcome.summary()],
        key=artifact_key("evaluation", folder.name),
        description=f"{folder} after {plural(outcome.updates, 'update')}, on {plural(len(outcome.tasks), 'task')}",
    )


def iteration_line(report: IterationReport) -> str:
    """Format an iteration on one line, with the returns before and after adaptation and the speed."""
    returns, statistic = headline_returns(adaptation_returns(report.metrics), report.class_returns)
    labels = ("before", "after") if len(returns) > 1 else ("return",)
    shown = zip(labels, (returns[0], returns[-1]) if len(returns) > 1 else returns, strict=True)
    parts = [f"iteration {report.iteration} ({report.iteration + 1} of {report.iterations})"]
    parts += [*(f"{label} {number(value)}" for label, value in shown), f"({statistic})"]
    parts += [classes_text(report.class_returns)] if report.class_returns else []
    return "  ".join([*parts, speed(report.steps_per_second)])


def table_of(metrics: Mapping[str, float]) -> list[dict[str, Cell]]:
    return [{"metric": name, "value": shown(value), "standard error": None} for name, value in metrics.items()]


def _class_table(report: IterationReport) -> list[dict[str, Cell]]:
    """Return the mean returns per task class as table rows, to be appended to the metrics."""
    return [
        {
            "metric": f"step_{k}.average_return, class {name}",
            "value": shown(estimate.mean),
            "standard error": shown(estimate.standard_error),
        }
        for k, returns in enumerate(report.class_returns)
        for name, _, estimate in named_estimates(returns)
    ]


def shown(value: float) -> Cell:
    """Return a table cell: an integer unchanged, another number to six significant digits, infinity and NaN as text."""
    if not math.isfinite(value):
        return str(value)
    return int(value) if value == round(value) else float(f"{value:.6g}")


def curve_of(run: storage.Run) -> str:
    """Return the learning curve so far as a data URI of a PNG image, which works in any browser."""
    picture = rendered(learning_curve(run.path.name, load_history(run)), "png", dpi=80)
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def summary(folder: Path, report: ReportFiles | None) -> str:
    """Return Markdown text with the run's location and the commands that show, resume, replay and report it."""
    run = str(folder)
    lines = [f"The run `{folder.name}` is in `{run}`."]
    if report is not None:
        address = address_of(folder, report.html.name)
        page = f"[report page]({address})" if address else "report page"
        lines.append(f"Its {page} is `{report.html}`, its learning curve `{report.png}`.")
    commands = ("show", "resume", "replay", "report")
    return "\n\n".join([*lines, "\n".join(["```", *(f"metaloom {command} {run}" for command in commands), "```"])])


def artifact_key(what: str, run: str) -> str:
    """Return a Prefect artifact key, which consists of lower-case letters, digits and dashes."""
    return f"{what}-{re.sub('[^a-z0-9]+', '-', run.lower()).strip('-')}"
