"""Per-iteration learning history of a run, for its charts. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from metaloom.flows.errors import UsageError
from metaloom.flows.results.class_returns import ByStep, classes_of, episode_classes, mean_returns
from metaloom.pipeline.envs.task_classes import Classes
from metaloom.pipeline.types import Array, Evaluation
from metaloom.storage import Run, StageRef, argument
from metaloom.storage.progress import Progress, unseen

_BLOCK = 200  # number of iterations whose episode tables are in memory at the same time
STEPS = "environment steps"
_TOLD_EVERY = 1000  # number of records between progress reports


@dataclass(frozen=True)
class RunHistory:
    """Learning history of a run, with one entry per complete iteration."""

    iterations: Array  # iteration indices, [I]
    metrics: Mapping[str, Array]  # values keyed by metric, [I] float64 each; NaN for iterations without the metric
    task_returns: Array  # mean episode return per iteration, inner step and task, [I, K+1, B]
    by_class: Sequence[ByStep] = ()  # per-class returns at each inner step, per iteration; empty without classes
    task_classes: Array | None = None  # class index of each task, [I, B]; None without classes
    classes: Classes | None = None

    @property
    def env_steps(self) -> Array | None:
        """Total environment steps at the end of each iteration, [I]; None if the stages do not count them."""
        return self.metrics.get("env_steps")

    @property
    def axis(self) -> tuple[Array, str]:
        """Values of the charts' x axis, [I], and its label: environment steps if counted, otherwise iterations."""
        return (self.iterations, "iteration") if self.env_steps is None else (self.env_steps, STEPS)

    @property
    def last_step(self) -> int:
        """Number of inner steps, K."""
        return self.task_returns.shape[1] - 1

    def followed_by(self, newer: "RunHistory") -> "RunHistory":
        """Return this history extended by the history of later iterations."""
        both = [(history.metrics, np.full(len(history.iterations), np.nan)) for history in (self, newer)]
        names = {**self.metrics, **newer.metrics}
        return replace(
            newer,
            iterations=np.concatenate([self.iterations, newer.iterations]),
            metrics={name: np.concatenate([metrics.get(name, none) for metrics, none in both]) for name in names},
            task_returns=np.concatenate([self.task_returns, newer.task_returns]),
            by_class=[*self.by_class, *newer.by_class],
            task_classes=None
            if self.task_classes is None or newer.task_classes is None
            else np.concatenate([self.task_classes, newer.task_classes]),
        )


def load_history(run: Run, iterations: Sequence[int] | None = None, *, on_progress: Progress = unseen) -> RunHistory:
    """Read a run's learning history in the given complete iterations, by default all, from its tables."""
    # Read once, since a run may grow in the meantime.
    chosen = run.iterations if iterations is None else iterations
    if not chosen:
        raise UsageError(
            f"{run.path} has no complete iteration, so there is nothing to report yet; "
            f"continue with: metaloom resume {argument(run.path)}"
        )
    classes, history = classes_of(run), None
    # Read in blocks, since the episode tables take far more memory than the result.
    for first in range(0, len(chosen), _BLOCK):
        on_progress(first, len(chosen))
        block = chosen[first : first + _BLOCK]
        episodes, metrics = run.episodes(block), run.metrics(block)
        _, steps, returns, _ = means = mean_returns(episodes)
        by_class, task_classes = ({}, None) if classes is None else episode_classes(episodes, classes, means)
        newer = RunHistory(
            iterations=np.asarray(block),
            metrics={
                name: metrics[name].cast(pa.float64()).to_numpy().astype(np.float64, copy=False)
                for name in metrics.column_names
                if name != "iteration"
            },
            task_returns=returns.reshape(len(block), len({*steps.tolist()}), -1),
            by_class=[*by_class.values()],
            task_classes=task_classes,
            classes=classes,
        )
        history = newer if history is None else history.followed_by(newer)
    assert history is not None
    return history


def evaluation_after(run: Run, iteration: int, env_steps: float | None = None) -> tuple[float, Evaluation] | None:
    """Return the environment steps at the end of an iteration and the evaluation after it; None if there is none."""
    ref = run.stages.in_group("evaluation", iteration)
    if ref is None or not run.contains(ref):
        return None
    steps = run[iteration].metrics().get("env_steps", float("nan")) if env_steps is None else env_steps
    return steps, run[iteration].evaluation()


def stage_seconds(run: Run, num_iterations: int, on_progress: Progress = unseen) -> dict[StageRef, Array]:
    """Return the wall seconds of each stage, [I] each, keyed by its ref in iteration 0, in execution order."""
    # The stage that initializes the learner is not part of an iteration.
    refs = [ref for ref in run.refs() if ref.stage != run.stages.first and ref.iteration < num_iterations]
    seconds: dict[StageRef, Array] = {}
    for n, ref in enumerate(refs):
        if n % _TOLD_EVERY == 0:
            on_progress(n, len(refs))
        in_first = replace(ref, iteration=0)
        seconds.setdefault(in_first, np.full(num_iterations, np.nan))[ref.iteration] = run.record(ref).seconds
    return seconds
