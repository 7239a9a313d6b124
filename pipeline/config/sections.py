"""RunConfig sections for evaluation, storage, warm starts and stopping."""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from metaloom.pipeline.comparison.intervals import student_cdf
from metaloom.pipeline.schema import ConfigError, Settings, later, suggestion
from metaloom.pipeline.types import Array, Metrics


class EvaluationConfig(Settings):
    """Settings for evaluation during training, which are also the defaults of `metaloom evaluate`."""

    every: int | None = Field(default=None, ge=1)
    """Evaluate after every N training updates; null: never. Training is not affected."""
    tasks: Literal["held-out", "train"] | tuple[tuple[float, ...], ...] = "held-out"
    """held-out: the environment's test tasks, or newly drawn tasks. train: its training set, or the last iteration's
    tasks. Alternatively, the tasks themselves, each as a list of values."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Number of tasks; null: as in training for training tasks and distributions; otherwise, each task once."""
    evenly_by: str | None = None
    """Task field whose values divide a fixed set into classes to draw from evenly; without num_tasks, one task each."""
    task_sampling: Literal["uniform", "balanced"] = later("uniform")
    """balanced: draw equally many tasks from each class that the environment declares, with num_tasks in total
    (default: as in training)."""
    adaptation_steps: int | None = Field(default=None, ge=0)
    """Number of adaptation steps; null: as in training. Additional steps use the last step size."""
    episodes: int | None = Field(default=None, ge=1)
    """Episodes per task and adaptation step; null: as in training."""
    test_episodes: int | None = Field(default=None, ge=1)
    """Test episodes per task after each adaptation step, not used for adaptation; null: as in training."""
    deterministic: bool = False
    """Take the most likely action in test episodes. Episodes for a gradient step always explore. Episodes for task
    inference select actions as test episodes do, except where `remembered` applies (RL2, VariBAD)."""
    remembered: Literal["as-tested", "drawn"] | None = later(None)
    """For policies with memory: how actions are selected in remembered episodes. null or as-tested: as in test
    episodes, so that returns after 0 ... K episodes belong to one trial; drawn: sampled, to explore."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed from which tasks and episodes are drawn, independent of all random draws in training."""

    @model_validator(mode="after")
    def _tasks_are_a_table(self) -> "EvaluationConfig":
        if not isinstance(self.tasks, str) and len({len(task) for task in self.tasks}) != 1:
            raise ValueError(
                f"tasks must be rows of equal length, got lengths {sorted({len(task) for task in self.tasks})}"
            )
        if self.task_sampling == "balanced" and self.evenly_by is not None:
            raise ValueError(f"task_sampling is balanced but evenly_by is {self.evenly_by}; remove one of them")
        return self


class RetentionConfig(Settings):
    """Settings that select the iterations whose batches all stay on disk. Others can be recomputed with equal results.

    Without `keep_last` and `keep_every`, all batches are kept. With both, an iteration is kept if either selects it.
    """

    keep_last: int | None = Field(default=None, ge=0)
    """Keep the batches of the newest N iterations."""
    keep_every: int | None = Field(default=None, ge=1)
    """Keep the batches of every Nth iteration, starting with iteration 0."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Stop before the run's files exceed this number of bytes; warn at 90%."""


class ReplayConfig(Settings):
    """Settings for reading stored transitions. Results do not depend on them."""

    cache_mib: int = Field(default=1024, ge=1)
    """Memory for the newest transitions, in MiB; older ones are read from the store."""


class WarmStart(Settings):
    """Learner of a stored run, from which another run starts.

    A bare string names the run, optionally followed by @ and the number of updates.
    """

    run: str = Field(min_length=1)
    """Folder or name of the stored run."""
    updates: int | None = Field(default=None, ge=0)
    """Number of updates after which to take the learner; default: the latest, recorded when the run starts."""
    digest: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """Digest of the stored learner, recorded when the run starts and checked on every read."""

    @model_validator(mode="before")
    @classmethod
    def _accept_a_bare_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        run, at, updates = value.rpartition("@")
        return {"run": run, "updates": int(updates)} if at and updates.isdecimal() else {"run": value}


class StoppingConfig(Settings):
    """Criteria for ending a run before its last iteration; unset criteria do not apply."""

    samples: int | None = Field(default=None, ge=1)
    """Total number of environment steps."""
    return_threshold: float | None = None
    """Return that the last iteration's episodes must reach, after adaptation if the algorithm adapts."""
    statistic: Literal["min", "average", "max"] = "min"
    """Statistic of the returns to use: min (worst episode), average, or max (best episode)."""
    convergence_window: int | None = Field(default=None, ge=3)
    """Number of iterations over which a linear fit to the return must show no trend."""
    convergence_p_value: float = Field(default=0.99, gt=0, lt=1)
    """Minimum p-value of a two-sided t-test for zero slope."""
    metric: str | None = later(None, min_length=1)
    """Metric of the last iteration's episodes, such as success_rate. Taken after adaptation if the algorithm adapts,
    or at a given inner step, as in step_0.success_rate."""
    at_least: float | None = later(None)
    """Lower bound for the metric."""
    at_most: float | None = later(None)
    """Upper bound for the metric, for example for a distance."""
    combine: Literal["any", "all"] = "any"
    """any: one criterion is enough. all: all criteria must be met at the same time."""

    @model_validator(mode="after")
    def _options_have_their_criterion(self) -> "StoppingConfig":
        criteria = (self.samples, self.return_threshold, self.convergence_window, self.metric)
        if all(criterion is None for criterion in criteria):
            raise ValueError("stop names no criterion; give samples, return_threshold, convergence_window or metric")
        bounds = [bound for bound in (self.at_least, self.at_most) if bound is not None]
        if len(bounds) != (self.metric is not None):
            raise ValueError(
                f"metric is {self.metric!r}, at_least {self.at_least}, at_most {self.at_most}; give a metric and one "
                "of the two bounds, or none of the three"
            )
        if self.convergence_window is None and self.convergence_p_value != 0.99:
            raise ValueError("convergence_p_value is set but convergence_window is not; set both or neither")
        if self.return_threshold is None and self.convergence_window is None and self.statistic != "min":
            raise ValueError("statistic is set but no criterion uses returns; remove it")
        return self

    def met(self, history: Sequence[Metrics]) -> bool:
        """Return True if a run with these metrics, one entry per iteration, may end."""
        return bool(self.reasons(history))

    def reasons(self, history: Sequence[Metrics]) -> Sequence[str]:
        """Return descriptions of the criteria that end a run with these metrics; empty if the run continues."""
        if not history:
            return ()
        found = [*self._criteria(history)]
        met_reasons = [reason for met, reason in found if met]
        return met_reasons if self.combine == "any" or len(met_reasons) == len(found) else ()

    def _criteria(self, history: Sequence[Metrics]) -> Iterator[tuple[bool, str]]:
        """Yield for each criterion whether it is met, and a description of the value found."""
        last = history[-1]
        if self.samples is not None:
            made = last["env_steps"]
            yield made >= self.samples, f"{made:.0f} environment steps of {self.samples}"
        if (least := self.return_threshold) is not None:
            found = self._return(last)
            yield found >= least, f"the {self.statistic} return is {found:.4g}, at least {least:g}"
        if self.metric is not None:
            found = self._metric(last)
            if self.at_least is not None:
                yield found >= self.at_least, f"{self.metric} is {found:.4g}, at least {self.at_least:g}"
            elif self.at_most is not None:
                yield found <= self.at_most, f"{self.metric} is {found:.4g}, at most {self.at_most:g}"
        if (window := self.convergence_window) is not None:
            returns = np.array([self._return(metrics) for metrics in history[-window:]])
            flat = len(history) >= window and trend_p_value(returns) >= self.convergence_p_value
            yield flat, f"the {self.statistic} return has no trend over {window} iterations"

    def require_metric(self, names: Collection[str]) -> None:
        """Raise ConfigError if `stop` names a metric that is not among `names`, which have no `step_k.` prefix."""
        # Compare without the `step_k.` prefix.
        if self.metric is not None and _IN_STEP.sub("", self.metric) not in names:
            raise ConfigError(
                f"stop.metric: unknown metric {self.metric!r}; use a metric of the run's episodes: "
                f"{', '.join(sorted(names))}{suggestion(self.metric, names)}"
            )

    def _metric(self, metrics: Metrics) -> float:
        assert self.metric is not None
        name = self.metric if _IN_STEP.match(self.metric) else f"step_{_last_step(metrics)}.{self.metric}"
        if name not in metrics:
            known = sorted(key for key in metrics if _IN_STEP.match(key))
            raise ConfigError(f"stop.metric: unknown metric {self.metric!r}; the run has {', '.join(known)}")
        return metrics[name]

    def _return(self, metrics: Metrics) -> float:
        return metrics[f"step_{_last_step(metrics)}.{self.statistic}_return"]


_IN_STEP = re.compile(r"^step_\d+\.")


def _last_step(metrics: Metrics) -> int:
    return max(int(name[5:].split(".")[0]) for name in metrics if name.startswith("step_"))


def trend_p_value(values: Array) -> float:
    """Return the two-sided p-value of a t-test for zero slope in n >= 3 values."""
    n = len(values)
    times = np.arange(n) - (n - 1) / 2
    centred = np.asarray(values, np.float64) - np.mean(values)
    slope = float(times @ centred / (times @ times))
    residual = float(np.square(centred - slope * times).sum())
    error = math.sqrt(residual / (n - 2) / float(times @ times))
    if error == 0:
        return 1.0 if slope == 0 else 0.0
    return max(0.0, 2 - 2 * student_cdf(abs(slope) / error, n - 2))
