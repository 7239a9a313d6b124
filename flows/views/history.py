"""What a run learned, iteration by iteration, and the curves that show it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import adaptation_label
from metaloom.flows.results.class_returns import ByStep, classes_of, count_alike, episode_classes
from metaloom.flows.views.series import (
    CLASS_NOTE,
    ERROR_BAND,
    Lines,
    Series,
    class_color,
    estimates_series,
    explain_gaps,
    shown_steps,
    steps_note,
)
from metaloom.pipeline.envs.task_classes import Classes
from metaloom.pipeline.types import Array
from metaloom.storage import Run, argument
from metaloom.storage.progress import Progress, unseen

_BLOCK = 200
"""Iterations whose episodes are in memory at once."""
BAND_NOTE = "line: mean over episodes; band: middle half (25–75 %) of the tasks' means"
BAND = "middle half of the tasks"
BALANCED_NOTE = (
    "line: mean of the means of all classes of tasks, which count alike; band: ± 1 standard error over tasks"
)


@dataclass(frozen=True)
class History:
    """What a run learned, one row per complete iteration.

    Attributes:
        iterations: [I] their numbers.
        metrics: name -> [I] float64; NaN where an iteration has no such metric.
        task_returns: [I, K+1, B] mean episode return by inner step and task.
        by_class: [I] returns by class of task, of every inner step; empty where the environment has no classes.
        task_classes: [I, B] number of the class of every task; None where the environment has no classes.
        classes: that it has.
    """

    iterations: Array
    metrics: Mapping[str, Array]
    task_returns: Array
    by_class: Sequence[ByStep] = ()
    task_classes: Array | None = None
    classes: Classes | None = None

    @property
    def env_steps(self) -> Array:
        """[I] environment steps taken up to the end of each iteration."""
        return self.metrics["env_steps"]

    @property
    def last_step(self) -> int:
        """The number of inner steps, K."""
        return self.task_returns.shape[1] - 1

    def followed_by(self, newer: "History") -> "History":
        """Put the history of later iterations behind this one."""
        rows = len(self.iterations), len(newer.iterations)
        both = [_filled(history.metrics, n) for history, n in zip((self, newer), rows, strict=True)]
        names = {**self.metrics, **newer.metrics}
        return replace(
            newer,
            iterations=np.concatenate([self.iterations, newer.iterations]),
            metrics={name: np.concatenate([part(name) for part in both]) for name in names},
            task_returns=np.concatenate([self.task_returns, newer.task_returns]),
            by_class=[*self.by_class, *newer.by_class],
            task_classes=None
            if self.task_classes is None or newer.task_classes is None
            else np.concatenate([self.task_classes, newer.task_classes]),
        )


def load_history(run: Run, iterations: Sequence[int] | None = None, *, on_progress: Progress = unseen) -> History:
    """Read what a run learned from its tables; of some complete iterations, or of all.

    Args:
        run: Run to read.
        iterations: Complete iterations to read; all by default.
        on_progress: Called with the number of iterations read so far, and of all.

    Raises:
        UsageError: the run has no complete iteration yet.
        StoreError: a table is damaged.
    """
    # Asked once: a run that is still training grows while it is read.
    chosen = run.iterations if iterations is None else iterations
    if not chosen:
        raise UsageError(
            f"{run.path} has no complete iteration, so there is nothing to report yet; "
            f"go on with: metaloom resume {argument(run.path)}"
        )
    classes, history = classes_of(run), None
    # In blocks: a row per episode takes far more memory than what is kept of it.
    for first in range(0, len(chosen), _BLOCK):
        on_progress(first, len(chosen))
        newer = _read(run, chosen[first : first + _BLOCK], classes)
        history = newer if history is None else history.followed_by(newer)
    assert history is not None
    return history


def _read(run: Run, iterations: Sequence[int], classes: Classes | None) -> History:
    episodes = run.episodes(iterations)
    by_class, task_classes = ({}, None) if classes is None else episode_classes(episodes, classes)
    return History(
        iterations=np.asarray(iterations),
        metrics=metric_columns(run.metrics(iterations)),
        task_returns=_task_returns(episodes, len(iterations)),
        by_class=[*by_class.values()],
        task_classes=task_classes,
        classes=classes,
    )


def learning_lines(name: str, history: History) -> Lines:
    """Average episode return before and after adaptation.

    All classes count alike where `count_alike` says so: which ones an iteration drew more of does not show then.
    """
    title, unshown = f"Learning curve of {name}", steps_note(history.last_step)
    if count_alike(history.by_class):
        series = tuple(_balanced_series(history))
        return explain_gaps(
            Lines("learning_curve", title, "class-balanced episode return", BALANCED_NOTE + unshown, ERROR_BAND, series)
        )
    series = tuple(_return_series(history))
    return Lines("learning_curve", title, "average episode return", BAND_NOTE + unshown, BAND, series)


def class_lines(history: History) -> Iterator[Lines]:
    """Average episode return of each class of task: after adaptation, and before it."""
    last, names = history.last_step, history.by_class[0][0].names if history.by_class else ()
    for k in sorted({last, 0}, reverse=True) if names else ():
        title = f"Return by class of task, {adaptation_label(k, last)}" if last else "Return by class of task"
        name = "returns_by_class" if k == last else "returns_by_class_before"
        series = (
            estimates_series(label, class_color(c), [steps[k].estimates[c] for steps in history.by_class])
            for c, label in enumerate(names)
        )
        yield explain_gaps(Lines(name, title, "average episode return", CLASS_NOTE, ERROR_BAND, tuple(series)))


def metric_columns(table: pa.Table) -> dict[str, Array]:
    """The metrics of a table of them, each [I] float64."""
    return {
        name: table[name].cast(pa.float64()).to_numpy().astype(np.float64, copy=False)
        for name in table.column_names
        if name != "iteration"
    }


def _balanced_series(history: History) -> Iterator[Series]:
    last = history.last_step
    for k, color in shown_steps(last).items():
        series = estimates_series(adaptation_label(k, last), color, [steps[k].balanced for steps in history.by_class])
        # As without classes: between the first and the last a band would only cover the others.
        yield series if k in (0, last) else replace(series, band=None)


def _return_series(history: History) -> Iterator[Series]:
    last = history.last_step
    for k, color in shown_steps(last).items():
        by_task = history.task_returns[:, k]
        # Between the first and the last a band would only cover the others.
        edges = np.quantile(by_task, [0.25, 0.75], axis=1) if k in (0, last) else None
        band = None if edges is None or by_task.shape[1] == 1 else (edges[0], edges[1])
        yield Series(adaptation_label(k, last), color, by_task.mean(axis=1), band)


def _task_returns(episodes: pa.Table, num_iterations: int) -> Array:
    means = episodes.group_by(["iteration", "step", "task"]).aggregate([("return", "mean")])
    means = means.sort_by([("iteration", "ascending"), ("step", "ascending"), ("task", "ascending")])
    inner_steps = len(means["step"].unique())
    return means["return_mean"].to_numpy().reshape(num_iterations, inner_steps, -1)


def _filled(metrics: Mapping[str, Array], rows: int):
    return lambda name: metrics[name] if name in metrics else np.full(rows, np.nan)
