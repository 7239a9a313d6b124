"""Iteration reports of a stored run, like those during training."""

import numpy as np

from metaloom.flows.formatting import seconds_of
from metaloom.flows.observer import IterationReport, mean_test_returns
from metaloom.flows.results.class_returns import classes_of, mean_returns, returns_by_class
from metaloom.storage import Run


class StoredReports:
    """Builder of reports from a run's tables and records, which thinning keeps."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._classes = classes_of(run)
        self._base: float | None = None

    def of(self, iteration: int) -> IterationReport:
        """Return the report of a complete iteration. Elapsed time starts at the first iteration requested."""
        run = self._run
        records = [run.record(ref) for ref in run.refs_of([iteration]) if ref.stage != run.stages.first]
        first = min(seconds_of(record.started, 0.0) for record in records)
        last = max(seconds_of(record.started, 0.0) + record.seconds for record in records)
        if self._base is None:
            self._base = first
        evaluations = [record for record in records if run.stages[record.ref.stage].output == "Evaluation"]
        seconds = last - first - sum(record.seconds for record in evaluations)
        episodes = run.episodes(iteration)
        _, inner_steps, returns, _ = mean_returns(episodes)
        steps = sum(episodes["length"].to_pylist())
        return IterationReport(
            iteration=iteration,
            iterations=run.capacity,
            metrics=run[iteration].metrics(),
            stage_seconds={f"{record.ref.stage}.{record.ref.step}": record.seconds for record in records},
            elapsed_seconds=last - self._base,
            steps_per_second=steps / seconds if seconds > 0 else None,
            class_returns=returns_by_class(run, [iteration], self._classes).get(iteration, ()),
            evaluation_returns=mean_test_returns(run.load(record.ref) for record in evaluations),
            task_returns=[returns[inner_steps == k] for k in np.unique(inner_steps)],
        )
