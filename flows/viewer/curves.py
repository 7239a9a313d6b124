"""Curves of a run for the page, read incrementally."""

from threading import Lock
from typing import Any

from metaloom.flows.views.history import RunHistory, evaluation_after, load_history
from metaloom.flows.views.run_charts import curves, learning_chart
from metaloom.flows.views.series import chart_data, evenly_spaced, numbers
from metaloom.pipeline.shown import error_text
from metaloom.pipeline.types import Evaluation
from metaloom.storage import Run, StoreError

MOST_POINTS = 2000  # maximum number of points per curve; longer runs are shown at every second, fourth, ... iteration
MOST_PROBLEMS = 20
SPARK_POINTS = 60


class Curves:
    """Learning curves of a run, as read so far. Unreadable iterations are skipped and reported with the reason."""

    def __init__(self, run: Run) -> None:
        self._run, self._lock = run, Lock()
        self._history: RunHistory | None = None
        self._problems: dict[int, str] = {}
        self._evaluations: dict[int, tuple[float, Evaluation]] = {}
        self._next, self._every = 0, 1

    def data(self) -> dict[str, Any]:
        """Return the current curves of the run as JSON data.

        `every` is the interval between shown iterations; `env_steps` is None if the steps are not counted; `charts` are
        results of `chart_data`; `problems` contains the reason for each skipped iteration.
        """
        with self._lock:
            if (remote := self._run.files.remote) is not None:
                remote.pull()
            self._read_on()
            history = self._history
            state = {"iterations_done": len(self._run.iterations), "every": self._every}
            problems = [{"iteration": i, "message": text} for i, text in sorted(self._problems.items())]
            if history is None:
                return {**state, "iterations": [], "env_steps": [], "charts": [], "metrics": {}, "problems": problems}
            return {
                **state,
                "iterations": history.iterations.tolist(),
                "env_steps": None if history.env_steps is None else numbers(history.env_steps),
                "charts": [*map(chart_data, curves(self._run.name, history, self._evaluations))],
                "metrics": {name: numbers(values) for name, values in history.metrics.items()},
                "problems": problems,
            }

    def _read_on(self) -> None:
        run, every = self._run, 1
        done = len(run.iterations)
        while done > MOST_POINTS * every:
            every *= 2
        if every != self._every or done < self._next or self._is_repaired(run):
            self._history, self._problems, self._evaluations, self._next, self._every = None, {}, {}, 0, every
        # The last iteration read may have been evaluated since then, because it is complete before its evaluation.
        for i in {*range(max(0, self._next - self._every), done)} - {*self._evaluations}:
            try:
                if (found := evaluation_after(run, i)) is not None:
                    self._evaluations[i] = found
            except StoreError as problem:
                self._problems[i] = error_text(problem)
        new = range(self._next, done, every)
        if not new:
            return
        try:
            self._add(load_history(run, new))
        except StoreError:
            for i in new:
                try:
                    self._add(load_history(run, [i]))
                except StoreError as problem:
                    if len(self._problems) < MOST_PROBLEMS:
                        self._problems[i] = error_text(problem)
        self._next = new[-1] + every

    def _is_repaired(self, run: Run) -> bool:
        """Return True if the first skipped iteration has become readable."""
        if not self._problems:
            return False
        try:
            first = min(self._problems)
            load_history(run, [first])
            evaluation_after(run, first)
        except StoreError:
            return False
        return True

    def _add(self, newer: RunHistory) -> None:
        self._history = newer if self._history is None else self._history.followed_by(newer)


def spark(run: Run) -> list[float | None]:
    """Return the values of the learning curve after adaptation at up to `SPARK_POINTS` evenly spaced iterations."""
    done = len(run.iterations)
    if not done:
        return []
    history = load_history(run, evenly_spaced(done, SPARK_POINTS).tolist())
    return numbers(learning_chart(run.name, history).panels[0].series[-1].values)
