"""Comparison of groups of runs by training curves and per-task scores; by default, only the seed varies in a group."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from metaloom import storage
from metaloom.flows import opened
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import count, last_return, plural, trial_length
from metaloom.flows.results.class_returns import mean_returns
from metaloom.flows.results.comparison import Comparison, Group, History
from metaloom.flows.run_groups import (
    RunGroup,
    check_comparable,
    difference_notes,
    environment_of,
    fork_notes,
    grouped,
    kin_notes,
    section,
    settings_of,
)
from metaloom.flows.runs import RunLike, check_seed, require_settings
from metaloom.flows.sweeps.stored import find_sweep
from metaloom.pipeline.comparison.groups import Resampled
from metaloom.pipeline.comparison.intervals import RESAMPLES
from metaloom.pipeline.comparison.scores import Scores
from metaloom.pipeline.schema import suggestion
from metaloom.pipeline.types import Array
from metaloom.storage import Run, run_exists

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def runs_named(names: Sequence[RunLike]) -> list[opened.Run]:
    """Open runs by name, path, pattern or sweep name; for a sweep, only the runs that have begun."""
    found: list[opened.Run] = []
    for name in names:
        if isinstance(name, storage.Run):
            found.append(name if isinstance(name, opened.Run) else opened.Run.open(name.path))
        elif isinstance(name, str) and "://" not in name and ("*" in name or "?" in name):
            found += opened.open_runs(name)
        elif isinstance(name, str) and "/" not in name and (sweep := find_sweep(name)) is not None:
            found += [opened.Run.open(folder) for run in sweep.runs if run_exists(folder := sweep.folder(run))]
        else:
            found.append(opened.open_run(name))
    return found


EVALUATION, AFTER_ADAPTATION = "evaluation", "return"
_NOT_MEASURED = ("evaluation.every", "evaluation.seed")
"""Settings of an evaluation that do not affect the meaning of its returns."""


class NoFiniteScore(UsageError):
    """Raised if a run has an iteration without a finite score."""


def read_histories(runs: Sequence[Run], metric: str | None, *, mixed: bool) -> tuple[str, list[History], list[str]]:
    """Read each run's scores for a metric; return the metric, the scores, and notes on the choice of metric."""
    tables: dict[Path, pa.Table] = {}
    for run in runs if metric in (None, EVALUATION) else ():
        with suppress(storage.StageMissing):
            if (table := run.evaluations()).num_rows:
                tables[run.path] = table
    notes: list[str] = []
    if metric is None:
        metric = EVALUATION if len(tables) == len(runs) else AFTER_ADAPTATION
        if tables and metric == AFTER_ADAPTATION:
            notes.append(
                f"only {len(tables)} of {plural(len(runs), 'run')} have stored evaluations, so runs are compared "
                "by training return instead"
            )
    if metric == EVALUATION:
        if missing := [run.name for run in runs if run.path not in tables]:
            raise UsageError(
                f"{missing[0]} has no stored evaluation; every run needs at least one: train with "
                "--set evaluation.every=10, or use --metric return"
            )
        _require_same_evaluations(runs, mixed=mixed)
        return metric, [_evaluated(run, tables[run.path]) for run in runs], notes
    if metric == AFTER_ADAPTATION:
        in_trials = [trial_length(run.config) > 1 for run in runs]
        if any(in_trials) and not all(in_trials):
            like = runs[in_trials.index(True)].name
            notes.append(
                f"the training return of {like} and runs like it covers whole trials, including their first "
                "episodes. To compare returns after adaptation, train with --set evaluation.every=10"
            )
    return metric, [_trained(run, metric) for run in runs], notes


def scored(
    metric: str, histories: Sequence[History], groups: Mapping[str, RunGroup], common: float, last: int
) -> dict[str, Scores]:
    """Return each group's scores within `common` environment steps: per task if known, otherwise per iteration."""
    runs = {run.path: run for group in groups.values() for run in group.runs}
    rows: dict[Path, Array] = {}
    tasks: dict[Path, tuple[str, bytes] | None] = dict.fromkeys(runs)
    for history in histories:
        path, done = history.path, history.before(common)
        if metric == EVALUATION:
            rows[path], about = _by_task(runs[path], int(done[-1]))
            tasks[path] = history.environment, about
        else:
            rows[path] = history.values[: len(done)][-last:]
    if metric == AFTER_ADAPTATION:
        by_task = {h.path: _training_returns(runs[h.path], h, common, last) for h in histories}
        if all(row is not None for row in by_task.values()):
            rows = {path: row for path, row in by_task.items() if row is not None}
    strata = {history.path: history.environment for history in histories}
    by_environment = len({frozenset(strata[run.path] for run in group.runs) for group in groups.values()}) == 1
    # If all runs in an environment had the same tasks, there are as many sets of tasks as environments, since tasks of
    # different environments are never the same.
    different = len(set(strata.values())) if by_environment else 1
    same = None not in tasks.values() and len(set(tasks.values())) == different
    return {
        name: Scores(
            tuple(rows[run.path] for run in group.runs),
            # Groups with one environment each, for example with --group env.name, are compared across environments.
            tuple(strata[run.path] if by_environment else "" for run in group.runs),
            same,
        )
        for name, group in groups.items()
    }


def described(metric: str, last: int) -> str:
    """Return a description of the score used to compare runs."""
    if metric == EVALUATION:
        return "test return after the last adaptation step, per task, in the last common evaluation"
    over = f"over at most the last {last} iterations" if last > 1 else "in the last iteration"
    if metric == AFTER_ADAPTATION:
        return f"training return after adaptation, per task, {over}"
    return f"{metric} {over}"


def _trained(run: Run, metric: str) -> History:
    try:
        table = run.metrics()
    except storage.StageMissing:
        raise UsageError(
            f"{run.name} has no complete iteration; every run needs at least one. "
            f"Continue it with `metaloom resume {storage.argument(run.path)}`, or compare only the other runs"
        ) from None
    column = last_return(table.column_names) if metric == AFTER_ADAPTATION else metric
    if column is None:
        raise UsageError(f"{run.name} has no returns among its metrics; choose a metric with --metric NAME")
    metrics = [name for name in table.column_names if name != "iteration"]
    if column not in metrics:
        raise UsageError(
            f"{run.name} has no metric {metric!r}; choose evaluation, return or one of its metrics, which "
            f"`metaloom show {storage.argument(run.path)}` lists"
            f"{suggestion(metric, [EVALUATION, AFTER_ADAPTATION, *metrics])}"
        )
    return _history(run, table, table["iteration"].to_numpy(), table[column].to_numpy().astype(np.float64))


def _evaluated(run: Run, evaluations: pa.Table) -> History:
    tests = _last_tests(evaluations)
    iterations, places = np.unique(tests["iteration"].to_numpy(), return_inverse=True)
    values = np.bincount(places, tests["return"].to_numpy()) / np.bincount(places)
    return _history(run, run.metrics(), iterations, values)


def _history(run: Run, metrics: pa.Table, iterations: Array, values: Array) -> History:
    steps = dict(zip(metrics["iteration"].to_pylist(), metrics["env_steps"].to_pylist(), strict=True))
    known = np.isfinite(values)
    if not known.all():
        raise NoFiniteScore(
            f"{run.name}: iteration {iterations[~known][0]} has no finite score, but every iteration needs one. "
            "Choose a different --metric"
        )
    return History(
        path=run.path,
        name=run.name,
        seed=int(run.config["seed"]),
        environment=environment_of(run),
        iterations=iterations,
        steps=np.array([steps[int(i)] for i in iterations], np.float64),
        values=values,
    )


def _training_returns(run: Run, history: History, common: float, last: int) -> Array | None:
    """Return per-task mean returns after adaptation in the last iterations; None if metrics count other episodes."""
    window = [int(i) for i in history.before(common)[-last:]]
    table, metrics = run.episodes(window), run.metrics(window)
    _, steps, returns, _ = mean_returns(table)
    final = steps.max()
    column, played = f"step_{final}.num_episodes", int((table["step"].to_numpy() == final).sum())
    # With task inference, rollout batches do not correspond to the inner steps in metrics.
    if column not in metrics.column_names or int(sum(metrics[column].to_pylist())) != played:
        return None
    return returns[steps == final]


def _by_task(run: Run, iteration: int) -> tuple[Array, bytes]:
    """Return an evaluation's mean return per task, [B], sorted by task parameters, and the parameters as bytes."""
    tests = _last_tests(run.evaluations(iteration))
    task = tests["task"].to_numpy()
    means = np.bincount(task, tests["return"].to_numpy()) / np.bincount(task)
    first = np.unique(task, return_index=True)[1]
    names = [name for name in tests.column_names if name.startswith("task_")]
    # Tasks drawn from the same set are in a different order for each seed.
    params = np.array([tests[name].to_numpy()[first].astype(np.float64) for name in names]).reshape(-1, len(means))
    order = np.lexsort(params) if names else np.arange(len(means))
    return means[order], f"{params.shape}".encode() + params[:, order].tobytes()


def _last_tests(table: pa.Table) -> pa.Table:
    """Return the test episodes after the last adaptation step."""
    steps = table["adaptation_steps"].to_numpy()
    test = table["test"].to_numpy(zero_copy_only=False).astype(bool)
    return table.filter(pa.array(test & (steps == steps[test].max())))


def _require_same_evaluations(runs: Sequence[Run], *, mixed: bool) -> None:
    if mixed:
        return
    first = settings_of(runs[0])
    for run in runs[1:]:
        other = settings_of(run)
        names = (n for n in sorted({*first, *other}) if section(n) == "evaluation" and n not in _NOT_MEASURED)
        if name := next((name for name in names if first.get(name) != other.get(name)), None):
            raise UsageError(
                f"the runs have different evaluations: {name} is {first.get(name)} in {runs[0].name} and "
                f"{other.get(name)} in {run.name}, so their returns are not comparable. Use --metric return, "
                "or pass --mixed (in Python: mixed=True)"
            )


CURVE_POINTS, PROFILE_POINTS = 60, 101


def compare(
    runs: Sequence[Run],
    *,
    metric: str | None = None,
    group: Sequence[str] = (),
    last: int = 10,
    mixed: bool = False,
    seed: int = 0,
) -> Comparison:
    """Compare groups of runs; by default, the runs in a group differ only in their seed."""
    check_seed(seed)
    for run in runs:
        require_settings(run)
    check_comparable(runs, mixed=mixed)
    metric, scores_of_runs, notes = read_histories(runs, metric, mixed=mixed)
    notes += fork_notes(runs)
    histories = {history.path: history for history in scores_of_runs}
    common = min(history.steps[-1] for history in scores_of_runs)
    if max(history.steps[-1] for history in scores_of_runs) > common:
        notes.append(f"compared by their last scores within {count(float(common))} environment steps, which all have")
    members = grouped(runs, group, mixed=mixed)
    notes += kin_notes(members)
    notes += [] if group else difference_notes(members.values())
    steps = _curve_steps(scores_of_runs, common)  # must precede `scored`: rejects runs without a score by then
    scores = scored(metric, scores_of_runs, members, common, last)
    resampled = Resampled(scores, seed, RESAMPLES)
    values = np.concatenate([run for group in scores.values() for run in group.runs])
    thresholds = np.linspace(values.min(), values.max(), PROFILE_POINTS)
    groups = [
        Group(
            name,
            found.settings,
            tuple(histories[run.path] for run in found.runs),
            scores[name],
            resampled.mean(name),
            resampled.interquartile_mean(name),
            resampled.profile(name, thresholds),
            resampled.curve(name, np.array([histories[run.path].at(steps) for run in found.runs])),
        )
        for name, found in members.items()
    ]
    return Comparison(
        metric=metric,
        about=described(metric, last),
        env_steps=int(common),
        groups=tuple(sorted(groups, key=lambda group: -group.iqm.value)),
        pairs=tuple(resampled.pairs()),
        thresholds=thresholds,
        curve_steps=steps,
        notes=tuple(notes),
        seed=seed,
        resamples=RESAMPLES,
        draw=_draw,
    )


def _draw(found: Comparison) -> "Figure":
    from metaloom.flows.views.run_charts import comparison_figure  # imports matplotlib, which only drawing needs

    return comparison_figure(found)


def _curve_steps(histories: Sequence[History], common: float) -> Array:
    """Return up to CURVE_POINTS environment steps at which all runs have scores, ascending."""
    last = max(histories, key=lambda history: history.steps[0])
    points = np.unique(np.concatenate([history.steps for history in histories]))
    points = points[(points >= last.steps[0]) & (points <= common)]
    if not len(points):
        raise UsageError(
            f"{last.name} has no score within {count(float(common))} environment steps, the most that all runs have "
            "scores for. Use --metric return, train with a smaller evaluation.every, or `metaloom resume` the others"
        )
    return points[np.unique(np.linspace(0, len(points) - 1, CURVE_POINTS).round().astype(int))]
