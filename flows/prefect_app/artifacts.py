"""Artifacts on Prefect's page besides the stages: progress, last metrics, where the run is."""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from metaloom import storage
from metaloom.flows.commands.evaluate import EvaluationOutcome
from metaloom.flows.commands.replay import StageReplay
from metaloom.flows.commands.train import IterationReport
from metaloom.flows.runs import report_folder
from metaloom.flows.views.class_returns import classes_text, named_estimates, plus_minus
from metaloom.flows.views.formatting import adaptation_returns, duration, number, plural, speed, stage_name
from metaloom.flows.views.report import ReportFiles, write_report

# Artifacts are written while training waits, at about 10 ms each, and a table adds a version with every update.
PROGRESS_SECONDS = 5.0
METRICS_SECONDS = 30.0


class TrainingPage:
    """The artifacts of a flow run that trains.

    Keys are made from the run's name, so that a run that goes on in another flow run adds to its own artifacts.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder.resolve()
        self._clock = clock
        self._updated = {"progress": -math.inf, "metrics": -math.inf}
        self._progress: UUID | None = None
        self._logger = get_run_logger()

    def open(self) -> None:
        """Show where the run lies before there is anything in it."""
        name = self._folder.name
        create_link_artifact(self._folder.as_uri(), name, key=artifact_key("run", name), description="The run's folder")
        self._publish_summary(None)

    def iteration_done(self, report: IterationReport) -> None:
        """Show an iteration; an Observer's callback."""
        last = report.iteration + 1 >= report.iterations
        self._logger.info(iteration_line(report))
        if last or self._is_due("progress", PROGRESS_SECONDS):
            self._publish_progress(report)
        if last or self._is_due("metrics", METRICS_SECONDS):
            self._publish_metrics(report)

    def close(self) -> None:
        """Show where the report of the finished run lies."""
        self._publish_summary(write_report(storage.open_run(self._folder), report_folder(self._folder)))

    def _is_due(self, what: str, seconds: float) -> bool:
        now = self._clock()
        due = now - self._updated[what] >= seconds
        if due:
            self._updated[what] = now
        return due

    def _publish_progress(self, report: IterationReport) -> None:
        percent = 100 * (report.iteration + 1) / report.iterations
        description = iteration_line(report)
        if self._progress is None:
            key = artifact_key("progress", self._folder.name)
            created = create_progress_artifact(percent, key=key, description=description)
            assert isinstance(created, UUID), "only callers in an event loop get a coroutine"
            self._progress = created
        else:
            update_progress_artifact(self._progress, percent, description=description)

    def _publish_metrics(self, report: IterationReport) -> None:
        create_table_artifact(
            [*table_of(report.metrics), *_class_table(report)],
            key=artifact_key("metrics", self._folder.name),
            description=f"Metrics of iteration {report.iteration}, {duration(report.elapsed_seconds)} after the start",
        )

    def _publish_summary(self, report: ReportFiles | None) -> None:
        create_markdown_artifact(
            summary(self._folder, report),
            key=artifact_key("summary", self._folder.name),
            description="Where the run lies and how to look further",
        )


def publish_replay(folder: Path, outcomes: Sequence[StageReplay]) -> None:
    """A table of the replayed stages, the differing arrays of each in a row of their own."""
    rows: list[dict[str, str | float | int | None]] = []
    for outcome in outcomes:
        stage = f"i={outcome.ref.iteration} {stage_name(outcome.ref)}"
        if outcome.identical:
            rows.append({"stage": stage, "result": outcome.proved})
        rows.extend(
            {
                "stage": stage,
                "result": "differs",
                "array": difference.array,
                "first index": str(list(difference.index)),
                "stored": difference.stored,
                "replayed": difference.replayed,
                "max ulp": difference.max_ulp,
            }
            for difference in outcome.differences
        )
    # One set of columns for all rows, or the page shows only those of the first.
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = [{name: row.get(name) for name in columns} for row in rows]
    create_table_artifact(table, key=artifact_key("replay", folder.name), description=f"Replay of {folder}")


def publish_evaluation(folder: Path, outcome: EvaluationOutcome) -> None:
    """Returns after every number of adaptation steps."""
    create_table_artifact(
        [{name: number(value) for name, value in row.columns.items()} for row in outcome.summary()],
        key=artifact_key("evaluation", folder.name),
        description=f"{folder} after {plural(outcome.updates, 'update')}, on {plural(len(outcome.tasks), 'task')}",
    )


def iteration_line(report: IterationReport) -> str:
    """One line about an iteration: returns before and after adaptation, speed."""
    returns = adaptation_returns(report.metrics)
    labels = ("before", "after") if len(returns) > 1 else ("return",)
    shown = zip(labels, (returns[0], returns[-1]) if len(returns) > 1 else returns, strict=True)
    return "  ".join(
        [
            f"iteration {report.iteration} ({report.iteration + 1} of {report.iterations})",
            *(f"{label} {number(value)}" for label, value in shown),
            *([classes_text(report.class_returns)] if report.class_returns else []),
            speed(report.steps_per_second),
        ]
    )


def table_of(metrics: Mapping[str, float]) -> list[dict[str, str]]:
    """Metrics as rows. As text, because JSON has no word for NaN and a page would show seventeen digits."""
    return [{"metric": name, "value": number(value)} for name, value in metrics.items()]


def _class_table(report: IterationReport) -> list[dict[str, str]]:
    """Returns by class of task as rows behind the metrics."""
    return [
        {"metric": f"step_{k}.average_return, class {name}", "value": plus_minus(estimate)}
        for k, returns in enumerate(report.class_returns)
        for name, _, estimate in named_estimates(returns)
    ]


def summary(folder: Path, report: ReportFiles | None) -> str:
    """Markdown about where a run lies and the commands to look further."""
    run = str(folder)
    lines = [f"The run `{folder.name}` lies in `{run}`."]
    if report is not None:
        lines.append(f"Learning curve: `{report.png}`. Report page: `{report.html}`.")
    commands = ("show", "resume", "replay", "report")
    return "\n\n".join([*lines, "\n".join(["```", *(f"metaloom {command} {run}" for command in commands), "```"])])


def artifact_key(what: str, run: str) -> str:
    """A key as Prefect takes it: lower-case letters, digits and dashes."""
    return f"{what}-{re.sub('[^a-z0-9]+', '-', run.lower()).strip('-')}"
