"""Operations that list and show runs, their logs, and the stages of a recipe."""

import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from metaloom.flows.arguments import checked
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import seconds_of
from metaloom.flows.operations import late
from metaloom.flows.operations.options import (
    Iteration,
    Natural,
    Overrides,
    Port,
    Positive,
    PythonOnly,
    RunArgument,
    RunAtArgument,
    Trust,
    agree,
    changes,
    complete_runs,
    refuse_with,
    refuse_without,
)
from metaloom.flows.results.run_rows import Facts, Row, Rows, State
from metaloom.flows.runs import RunAt, folder_of, parse_span, require_iteration, run_folder, runs_root
from metaloom.storage import StageRef, find_runs, location, open_run, run_exists, url_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from metaloom.flows.run_log import LogLines

    DataAndView = tuple[Callable[[], Any], Callable[[], RenderableType]]

Order = Literal["started", "return", "size", "name"]

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

# A run that cannot be read has neither start nor return: it comes last.
_ORDERS: Mapping[Order, Callable[[Row], Any]] = {
    "started": lambda row: -seconds_of(row.get("started")),
    "return": lambda row: -value if (value := row.get("last_return")) is not None else math.inf,
    "size": lambda row: -row["bytes"],
    "name": lambda row: row["name"],
}


@checked
def ls(
    *,
    algorithm: str | None = None,
    env: str | None = None,
    status: State | None = None,
    since: str | None = None,
    sort: Order = "started",
    reverse: bool = False,
    limit: Positive | None = None,
) -> Rows:
    """List the runs in the runs folder.

    The newest run comes first. Columns: age, environment, algorithm; complete and planned iterations; average return of
    the last iteration, after adaptation if there is any; bytes on disk, including shared files; state. A narrow
    terminal shows fewer columns.

    Example: `METALOOM_RUNS=/data/runs metaloom ls --algorithm promp --since 2d --sort return`

    Args:
        algorithm: List only runs with this algorithm.
        env: List only runs in this environment.
        status: List only runs in this state. A run that is neither complete nor being written was stopped, by an error
            or on request, or its writer was killed.
        since: List only runs that started in the last 30m, 12h, 2d or 1w, or since a date such as 2026-11-22 or
            2026-11-22T08:30 in local time.
        sort: Order: newest first, highest return first, largest first, or by name.
        reverse: Reverse this order.
        limit: Maximum number of runs.
    """
    earliest = -math.inf if since is None else _moment(since).timestamp()
    found = [*map(late.list_run_row, find_runs(runs_root()))]
    wanted = {"algorithm": algorithm, "env": env, "state": status}
    matching = (
        row
        for row in found
        if all(value is None or row.get(name) == value for name, value in wanted.items())
        and seconds_of(row.get("started")) >= earliest
    )
    rows = Rows(sorted(matching, key=_ORDERS[sort])[:: -1 if reverse else 1][:limit])
    if found:
        rows.nothing = f"none of {len(found)} runs in {location(runs_root())} matches"
    else:
        rows.nothing = f"no runs in {location(runs_root())}; `metaloom train promp-point-corner` makes one"
    return rows


def _moment(text: str) -> datetime:
    """Return the time that --since specifies."""
    if match := re.fullmatch(r"(\d{1,4})([mhdw])", text):
        return datetime.now(UTC) - timedelta(**{_UNITS[match[2]]: int(match[1])})
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        raise UsageError(
            f"--since {text}: expected a span such as 30m, 12h, 2d or 1w, or a date such as 2026-11-22"
        ) from None


@checked
def show(
    run: RunAtArgument,
    iteration: Iteration = None,
    *,
    stage: str | None = None,
    step: Natural | None = None,
    update: Natural | None = None,
    rows: str | None = None,
    context: bool = False,
    trust: Trust = False,
) -> Facts:
    """Show a run, or the stages of one iteration.

    For a run, it shows the state, metrics and sizes, and the settings that differ from the defaults (all for a custom
    algorithm).

    Example: `metaloom show first@3`

    Args:
        run: Run to show.
        iteration: Iteration to show; the run itself if None.
        stage: Stage of the iteration, shown with its inputs and its arrays with axes, units and meaning. For
            sample_transitions, this includes the drawn transitions and the origin of each; for process_samples, the
            parameters of the fitted baselines.
        step: Inner step of the stage; 0 by default.
        update: Gradient step whose transitions are shown; the iteration's first by default.
        rows: Transitions of the minibatch to show: N or FROM:TO, as in Python slicing; 0:20 by default,
            `:` for all.
        context: Show the transitions from which tasks were inferred, instead of those used for the update.
        trust: Allow importing the modules that the run's settings name, now and later.
    """
    at = RunAt.of(run, iteration)
    return Facts(found(at, stage=stage, step=step, update=update, rows=rows, context=context, trust=trust)[0]())


def found(
    at: RunAt,
    *,
    stage: str | None = None,
    step: int | None = None,
    update: int | None = None,
    rows: str | None = None,
    context: bool = False,
    trust: bool = False,
    everything: bool = False,
) -> "DataAndView":
    """Return two functions: one returns the requested facts as data, the other renders them."""
    opened = open_run(at.path)
    if stage not in (None, *(names := [known.name for known in opened.stages.stages])):
        raise UsageError(f"the run has no stage {stage}; --stage must be one of {', '.join(names)}")
    if at.iteration is not None:
        refuse_with("RUN@ITERATION", all=everything)
        require_iteration(opened, at.iteration)
    agree(at.path, trust)
    if stage is None:
        refuse_without("--stage STAGE", step=step)
    if stage == "sample_transitions":
        refuse_with("--stage sample_transitions", step=step)
    else:
        refuse_without("--stage sample_transitions", update=update, rows=rows, context=context)
    if (i := at.iteration) is None:
        if stage is not None:
            raise UsageError(f"--stage requires one iteration, such as {opened.path.name}@0")
        return lambda: late.run_info(opened), lambda: late.run_view(opened, everything=everything)
    if stage is None:
        return lambda: late.iteration_info(opened, i), lambda: late.iteration_view(opened, i)
    if stage == "process_samples":
        fitted = late.fitted_baselines(opened, i, step or 0)
        lists = {name: {part: value.tolist() for part, value in params.items()} for name, params in fitted.items()}
        return lambda: lists, lambda: late.parameters_table(fitted)
    if stage == "sample_transitions":
        span = parse_span("--rows", rows or "0:20")
        chosen = span if isinstance(span, slice) else slice(span, span + 1 or None)
        drawn = late.minibatch_info(opened, i, update or 0, chosen, context=context)
        return lambda: drawn, lambda: late.minibatch_view(drawn)
    info = late.output_info(opened, StageRef(i, stage, step or 0))
    return lambda: info, lambda: late.output_view(info)


RunsArgument = Annotated[
    str | Path | None,
    Parameter(
        help="A folder of runs, or one run: a name under the runs folder, a path, or a URL such as s3://bucket/runs. "
        "The runs folder by default.",
        completer=complete_runs,
    ),
]


@checked
def view(
    runs: RunsArgument = None, /, *, port: Port = 0, opened: Annotated[Callable[[str], None], PythonOnly] = print
) -> None:
    """Serve a page of curves, stages, batches and videos.

    The page is available on this machine until Ctrl-C. It follows training runs, changes nothing, and sends no requests
    to other hosts. It opens only at the printed address.

    Example: `metaloom view first --port 8080`

    Args:
        runs: Folder of runs, or one run; the runs folder if None.
        port: Port on 127.0.0.1; 0 for any free port.
        opened: Called with the address of the page.
    """
    place = runs_root() if runs is None else run_folder(runs)
    if runs is not None and url_of(place) is None and not place.exists() and Path(runs).is_dir():
        place = Path(runs)  # a relative path to a folder of runs outside the runs folder, or to the runs folder itself
    if url_of(place) is None and not place.is_dir():
        raise UsageError(f"{place}: no such folder; pass a run or a folder of runs. `metaloom ls` lists runs")
    late.serve_viewer(place, port, opened)


Level = Literal["debug", "info", "warning", "error"]


@checked
def logs(run: RunArgument, *, level: Level = "info") -> "LogLines":
    """Print the log of a run.

    It contains warnings, errors, iterations and lines from your own loggers.

    Example: `metaloom logs first --level warning`

    Args:
        run: Run to read.
        level: Minimum level of the lines; debug includes every stage.
    """
    lines = late.LogReader(open_run(folder_of(run)).path).new_lines()
    return late.LogLines(line for line in lines if line.is_at_least(level))


Form = Literal["text", "mermaid", "svg"]


@checked
def graph(
    recipe: Annotated[str, Parameter(help="A recipe, a .yaml, .json or .toml settings file, or a stored run.")],
    *,
    form: Annotated[Form, Parameter(name="--format")] = "text",
    overrides: Overrides = (),
    trust: Trust = False,
) -> str:
    """Draw a run's stages and their inputs.

    Example: `metaloom graph promp-half-cheetah-dir --format mermaid`

    Args:
        recipe: A recipe, a settings file, or a stored run.
        form: Text table, Markdown flowchart or image.
        overrides: Settings to change, as KEY=VALUE.
        trust: Allow importing the modules that the run's settings name, now and later.
    """
    if recipe in [*late.RECIPES] or late.is_settings_file(recipe):
        settings = late.load_settings(recipe)
    elif run_exists(folder := run_folder(recipe)):
        agree(folder, trust)
        settings = late.config_of(open_run(folder)).model_dump(mode="json")
    else:
        raise UsageError(
            f"no recipe and no stored run {recipe!r}: `metaloom recipes` and `metaloom ls` list them"
            f"{late.suggestion(recipe, late.RECIPES)}"
        )
    return late.FORMATS[form](late.diagram_of(late.build_config(late.override(settings, changes(overrides)))))
