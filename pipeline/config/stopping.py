"""Criteria that stop a run, computed from the metrics of its iterations alone."""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from metaloom.pipeline.comparison.intervals import student_cdf
from metaloom.pipeline.schema import ConfigError, Settings, later, suggestion
from metaloom.pipeline.types import Array, Metrics


class StoppingConfig(Settings):
    """Criteria that end a run before its last iteration; omitted ones do not apply."""

    samples: int | None = Field(default=None, ge=1)
    """Environment steps made."""
    return_threshold: float | None = None
    """A return of the last iteration's episodes, after adaptation where there is any."""
    statistic: Literal["min", "average", "max"] = "min"
    """Return to compare: of the worst episode, the mean, or of the best episode."""
    convergence_window: int | None = Field(default=None, ge=3)
    """Number of iterations over which the return must show no trend: a line fitted through it is flat."""
    convergence_p_value: float = Field(default=0.99, gt=0, lt=1)
    """Required certainty of flatness: the chance of a steeper line if there is no trend (two-sided t test)."""
    metric: str | None = later(None, min_length=1)
    """Metric of the last iteration's episodes to compare, such as success_rate: after adaptation where there is any,
    or at the inner step in its name, as in step_0.success_rate."""
    at_least: float | None = later(None)
    """Value from which on the metric meets the criterion."""
    at_most: float | None = later(None)
    """Value down to which the metric must fall to meet the criterion: for a distance, for example."""
    combine: Literal["any", "all"] = "any"
    """any: one criterion is enough; all: they must be met at once."""

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
            raise ValueError("statistic is set but no criterion looks at returns; leave it out")
        return self

    def met(self, history: Sequence[Metrics]) -> bool:
        """Return True if a run may end after the iterations with these metrics, in order."""
        return bool(self.reasons(history))

    def reasons(self, history: Sequence[Metrics]) -> Sequence[str]:
        """Return the criteria met after the iterations with these metrics; empty while the run continues."""
        if not history:
            return ()
        found = [*self._criteria(history)]
        told = [reason for met, reason in found if met]
        return told if self.combine == "any" or len(told) == len(found) else ()

    def _criteria(self, history: Sequence[Metrics]) -> Iterator[tuple[bool, str]]:
        """Yield for each criterion whether it is met, and the value found."""
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
        """Reject a metric that no rollout batch of the run will have.

        Raises:
            ConfigError: it is not among the names, which are without `step_k.`.
        """
        # Without the inner step that it names.
        if self.metric is not None and _IN_STEP.sub("", self.metric) not in names:
            raise ConfigError(
                f"stop.metric: found {self.metric!r}; required a metric of the run's episodes: "
                f"{', '.join(sorted(names))}{suggestion(self.metric, names)}"
            )

    def _metric(self, metrics: Metrics) -> float:
        assert self.metric is not None
        name = self.metric if _IN_STEP.match(self.metric) else f"step_{_last_step(metrics)}.{self.metric}"
        if name not in metrics:
            known = sorted(key for key in metrics if _IN_STEP.match(key))
            raise ConfigError(f"stop.metric: found {self.metric!r}; required a metric of the run: {', '.join(known)}")
        return metrics[name]

    def _return(self, metrics: Metrics) -> float:
        return metrics[f"step_{_last_step(metrics)}.{self.statistic}_return"]


_IN_STEP = re.compile(r"^step_\d+\.")


def _last_step(metrics: Metrics) -> int:
    return max(int(name[5:].split(".")[0]) for name in metrics if name.startswith("step_"))


def trend_p_value(values: Array) -> float:
    """Return the two-sided p of a t test that n values without a trend lie along a line at least as steep; n >= 3."""
    n = len(values)
    times = np.arange(n) - (n - 1) / 2
    centred = np.asarray(values, np.float64) - np.mean(values)
    slope = float(times @ centred / (times @ times))
    residual = float(np.square(centred - slope * times).sum())
    error = math.sqrt(residual / (n - 2) / float(times @ times))
    if error == 0:
        return 1.0 if slope == 0 else 0.0
    return max(0.0, 2 - 2 * student_cdf(abs(slope) / error, n - 2))
