"""Stored runs in the Python API. Opening a run requires neither torch nor a simulator."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, overload

import pyarrow as pa

from metaloom import storage
from metaloom.flows import formatting
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import plural
from metaloom.flows.results.class_returns import class_table, classes_of
from metaloom.flows.runs import RunLike, folder_of, runs_root
from metaloom.flows.views.run_info import headline_return
from metaloom.pipeline.shown import as_html
from metaloom.storage.read.outputs import Steps
from metaloom.storage.run import Iterations

if TYPE_CHECKING:
    from metaloom.flows.datasets import RunDataset, Unit
    from metaloom.flows.observer import IterationReport
    from metaloom.flows.trained.policy import TrainedPolicy
    from metaloom.flows.views.report import Plots
    from metaloom.pipeline.types import Metrics


class Run(storage.Run):
    """A stored run, with its policies, charts and datasets."""

    def policy(self, iteration: int = -1, *, seed: int = 0) -> "TrainedPolicy":
        """Return the policy with which an iteration starts, that is, after `iteration` updates; see TrainedPolicy.

        Args:
            iteration: Number of updates: 0 selects the untrained policy, -1 the newest.
            seed: Seed for the policy's random draws.

        Raises:
            storage.StageMissing: the run has fewer updates.
            EnvError: the run's environment cannot be built.
        """
        # Imported here because a policy needs torch and the environment, but reading a run needs neither.
        from metaloom.flows.trained.policy import policy_of

        return policy_of(self, iteration, seed=seed)

    @property
    def plot(self) -> "Plots":
        """Charts of the run, for example `run.plot.learning_curve()`."""
        from metaloom.flows.views.report import Plots  # matplotlib takes a second to import

        return Plots(self)

    def class_returns(self, iterations: Iterations = None) -> pa.Table:
        """Return a table with one row per iteration, inner step and task class: mean return and standard error.

        Standard errors are over tasks. The class `balanced` is the mean over classes. The mean of a class without tasks
        is null, as is the standard error of a single task.

        Raises:
            UsageError: the run recorded no task classes.
            storage.StageMissing: an iteration is not complete.
        """
        if (classes := classes_of(self)) is None:
            raise UsageError(
                f"{self.location}: its environment declared no task classes; define task_classes. A run "
                "from an earlier version gets them at its next `metaloom resume`"
            )
        return class_table(self, self.select(iterations), classes)

    def dataset(self, unit: "Unit", iterations: Iterations = None, steps: Steps = None) -> "RunDataset":
        """Return the stored episodes as a torch Dataset; see RunDataset.

        Args:
            unit: What each item contains: "transitions", "episodes" or "trials".
            iterations: Iterations to include; None for all complete iterations.
            steps: Inner steps k to include; None for all inner steps.
        """
        from metaloom.flows.datasets import RunDataset

        return RunDataset(self, unit, iterations, steps)

    def _repr_html_(self) -> str:
        return as_html(f"Run {self.location}", [*_facts(self).items(), ("created", self.info["created"])])


@dataclass(frozen=True, repr=False)
class FinishedIteration(storage.Iteration):
    """An iteration that has just been trained, with its stored batches.

    Attributes:
        run: Run that is being trained, open for reading.
        index: Index of the iteration, from 0.
        report: Report with metrics, returns by task and by class, and durations.
    """

    run: Run
    report: "IterationReport"

    @property
    def refs(self) -> list[storage.StageRef]:
        """References to the iteration's outputs."""
        return [ref for ref in self.run.refs() if ref.iteration == self.index]

    def metrics(self) -> "Metrics":
        """Return the metrics of the iteration."""
        return dict(self.report.metrics)


class Runs(Sequence[Run]):
    """Several runs with joint tables. The column `run` contains the run's name, or its path if names repeat.

    A run without data for a table adds no rows; if no run has data, storage.StageMissing is raised.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = tuple(runs)

    def __repr__(self) -> str:
        return f"Runs({', '.join(run.name for run in self._runs)})"

    def _repr_html_(self) -> str:
        header = ("run", *_facts(self._runs[0])) if self._runs else ()
        return as_html(plural(len(self), "run"), [header, *((run.name, *_facts(run).values()) for run in self._runs)])

    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> "Runs": ...
    def __getitem__(self, index: int | slice) -> "Run | Runs":
        return Runs(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def metrics(self, iterations: Iterations = None) -> pa.Table:
        """Return a table with one row per run and iteration; a metric that a run lacks is null."""
        return self._together(lambda run: run.metrics(iterations))

    def episodes(self, iterations: Iterations = None) -> pa.Table:
        """Return a table with one row per episode of each run; a column that a run lacks is null."""
        return self._together(lambda run: run.episodes(iterations))

    def class_returns(self, iterations: Iterations = None) -> pa.Table:
        """Return a table with one row per run, iteration, inner step and task class; see Run.class_returns."""
        return self._together(lambda run: run.class_returns(iterations))

    def evaluations(self, iterations: Iterations = None) -> pa.Table:
        """Return a table with one row per evaluation episode of each run."""
        return self._together(lambda run: run.evaluations(iterations))

    def _together(self, table_of: Callable[[Run], pa.Table]) -> pa.Table:
        times, named, missing = Counter(run.name for run in self._runs), [], None
        for run in self._runs:
            try:
                table = table_of(run)
            except storage.StageMissing as problem:
                missing = problem
                continue
            name = run.name if times[run.name] == 1 else str(run.path)
            named.append(table.add_column(0, "run", pa.array([name] * table.num_rows, pa.string())))
        if missing is not None and not named:
            raise missing
        return pa.concat_tables(named, promote_options="permissive")


def open_run(run: RunLike) -> Run:
    """Open a run for reading by its name in the runs folder, path or URL. The run may still be in progress.

    Raises:
        storage.StoreError: the run does not exist or cannot be read.
    """
    return Run.open(folder_of(run))


def open_runs(pattern: str | Path) -> Runs:
    """Open all runs whose name in the runs folder, or whose path, matches a pattern such as `promp-*` or `runs/**`.

    Raises:
        UsageError: no run matches, or the pattern is a URL.
        storage.StoreError: a run cannot be read.
    """
    if "://" in str(pattern):
        raise UsageError(
            f"cannot search the URL {pattern}; pass a pattern of names or paths. `open_run` opens one run by URL"
        )
    root = Path() if isinstance(pattern, Path) or "/" in pattern else runs_root()
    pattern = Path(pattern).expanduser()
    folders = (root / path for path in glob(f"{pattern}/", root_dir=root, recursive=True))
    # Skip subfolders of runs, one of which contains a copy of run.json.
    folders = (folder for folder in folders if not any((above / "run.json").exists() for above in folder.parents))
    found = sorted(filter(storage.run_exists, folders))
    if not found:
        raise UsageError(f"no run matches the pattern {str(root / pattern)!r}")
    return Runs([Run.open(path) for path in found])


def _facts(run: storage.Run) -> dict[str, str]:
    """Return facts about a run for display, keyed by label; the settings of someone else's run may be anything."""
    done = len(run.iterations)
    metrics = run.metrics(-1).to_pylist()[0] if done else {}
    last, statistic = headline_return(run)
    returns = " → ".join(formatting.number(value) for value in last) + (f" ({statistic})" if len(last) else "")
    success = " → ".join(formatting.number(value) for value in formatting.by_inner_step(metrics, "success_rate"))
    settings = {name: run.config.get(name) for name in ("algorithm", "env")}
    names = {name: str(part.get("name") if isinstance(part, Mapping) else part) for name, part in settings.items()}
    about = {**names, "iterations": f"{done} of {run.capacity}", "last returns, by inner step": returns}
    return about | ({"last success rates, by inner step": success} if success else {})
