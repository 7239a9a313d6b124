"""Evaluation results: test returns of a learner after 0 ... K adaptation steps."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from metaloom.flows.formatting import as_json, number, plural
from metaloom.flows.results.class_returns import ByStep, class_rows, official_success, success_rows
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.task_classes import Classes
from metaloom.pipeline.estimation.diagnostics import fact_means
from metaloom.pipeline.estimation.statistics import ClassReturns, bootstrap, interquartile_mean, mean
from metaloom.pipeline.shown import Row, Shown
from metaloom.pipeline.types import Array, Evaluation, TaskBatch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SEED = 0  # seed for resampling, so that repeated evaluations have the same intervals


@dataclass(frozen=True)
class AdaptationSummary:
    """Test returns after k adaptation steps, averaged over tasks."""

    adaptation_steps: int  # number of gradient steps or task inferences, k
    adaptation_episodes: int  # episodes per task in all k steps
    adaptation_env_steps: float  # mean number of environment steps per task in these episodes
    average_return: float  # mean of the per-task mean returns
    average_low: float  # 95% bootstrap interval; NaN for a single episode of a single task
    average_high: float
    iqm_return: float  # interquartile mean of the per-task mean returns
    iqm_low: float  # 95% bootstrap interval, as above
    iqm_high: float
    lower_quartile: float  # quartiles of the per-task mean returns
    upper_quartile: float
    facts: Mapping[str, float]  # means of the facts over test episodes; see `fact_means` and `official_success`

    @property
    def columns(self) -> dict[str, float]:
        """All values including facts, keyed by name."""
        about = asdict(self)
        return about | about.pop("facts")


def summarize_steps(evaluation: Evaluation, classes: Classes | None = None) -> list[AdaptationSummary]:
    """Return a summary for each number of adaptation steps; `classes` are the environment's task classes."""
    summaries: list[AdaptationSummary] = []
    for k in range(evaluation.adaptation_steps + 1):
        returns = evaluation.test_returns[:, k]
        rng = np.random.default_rng([_SEED, k])
        average, iqm = (bootstrap(returns, statistic, rng) for statistic in (mean, interquartile_mean))
        lower, upper = np.quantile(returns.mean(axis=1), [0.25, 0.75])
        facts = fact_means({name: values[:, k] for name, values in evaluation.test_facts.items()})
        facts |= official_success(evaluation, k, classes)
        used = k, k * evaluation.episodes_per_step, float(_steps_before(evaluation, k).mean())
        summaries.append(AdaptationSummary(*used, *average, *iqm, float(lower), float(upper), facts))
    return summaries


def summarize_tasks(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return a row per number of adaptation steps and task, with mean return, interval and task parameters."""
    rows: list[dict[str, Any]] = []
    for k in range(evaluation.adaptation_steps + 1):
        for b in range(len(evaluation.task_ids)):
            returns = evaluation.test_returns[b, k]
            interval = bootstrap(returns[None], mean, np.random.default_rng([_SEED, k, b]))
            seen = evaluation.adaptation_returns[b, k] if k < evaluation.adaptation_steps else None
            rows.append(
                {
                    "adaptation_steps": k,
                    "adaptation_episodes": k * evaluation.episodes_per_step,
                    "adaptation_env_steps": int(_steps_before(evaluation, k)[b]),
                    "task": b,
                    "task_id": int(evaluation.task_ids[b]),
                    **dict(zip(evaluation.names, evaluation.task_params[b].tolist(), strict=True)),
                    "average_return": interval.estimate,
                    "return_low": interval.low,
                    "return_high": interval.high,
                    "std_return": float(returns.std()),
                    "num_episodes": len(returns),
                    "average_length": float(evaluation.test_lengths[b, k].mean()),
                    "termination_rate": float(evaluation.test_terminated[b, k].mean()),
                    **fact_means({name: values[b, k] for name, values in evaluation.test_facts.items()}),
                    # Adaptation episodes of the next step, with the same policy; None after the last.
                    "next_adaptation_return": None if seen is None else float(seen.mean()),
                }
            )
    return rows


def summarize_classes(evaluation: Evaluation, classes: Classes | None) -> list[ClassReturns]:
    """Return the test returns per task class after each number of adaptation steps; empty without classes."""
    if classes is None:
        return []
    of = classes.of(evaluation.task_params, evaluation.names)
    means = evaluation.test_returns.mean(axis=2)
    return [classes.returns(means[:, k], of) for k in range(evaluation.adaptation_steps + 1)]


def _steps_before(evaluation: Evaluation, k: int) -> Array:
    """Return the number of environment steps in each task's first k adaptation steps, [B]."""
    return evaluation.adaptation_lengths[:, :k].sum(axis=(1, 2))


@dataclass(frozen=True, repr=False)
class EvaluationOutcome(Shown):
    """Result of evaluating a learner."""

    run: str
    updates: int  # number of updates before the evaluation
    config: RunConfig  # configuration of the run, with the requested evaluation settings
    evaluation: Evaluation
    tasks_are_new: bool  # True if no evaluation task occurs in training
    drawn_from: int | None  # size of the task set; None if tasks come from a distribution
    classes: Classes | None
    draw: "Callable[[EvaluationOutcome], Figure]"  # function that draws the returns

    def shown(self) -> tuple[str, list[Row]]:
        rows = [
            (str(s.adaptation_steps), number(s.average_return), f"{number(s.average_low)} to {number(s.average_high)}")
            for s in self.summary()
        ]
        tests = f"{self.counted_tasks}, {plural(self.evaluation.test_returns.shape[2], 'test episode')} each"
        title = f"EvaluationOutcome of {self.run} after {plural(self.updates, 'update')}: {tests}"
        title += f"; {self.extrapolation}" if self.extrapolation else ""
        return title, [("adaptation steps", "average return", "95% interval"), *rows]

    @property
    def tasks(self) -> TaskBatch:
        """Evaluation tasks."""
        return self.evaluation.tasks

    @property
    def counted_tasks(self) -> str:
        """Number of tasks as text, such as "10 tasks (of 80)" for a selection."""
        count = len(self.tasks)
        return plural(count, "task") + (f" (of {self.drawn_from:,})" if count < (self.drawn_from or 0) else "")

    @property
    def env_steps(self) -> int:
        """Number of environment steps taken by the evaluation; they do not count as training."""
        return self.evaluation.num_steps

    @property
    def extrapolation(self) -> str:
        """Warning that there are more adaptation steps than in training, otherwise "". PEARL has no fixed number."""
        trained = self.config.algorithm.evaluation_steps
        if self.config.algorithm.graph == "task_inference" or self.evaluation.adaptation_steps <= trained:
            return ""
        return f"trained for {plural(trained, 'step')}; later rows extrapolate"

    def plot(self) -> "Figure":
        """Plot returns against adaptation episodes with matplotlib."""
        return self.draw(self)

    def table(self) -> pa.Table:
        """Return the rows of `summarize_tasks` as a table."""
        return pa.Table.from_pylist(summarize_tasks(self.evaluation))

    def as_dict(self) -> dict[str, Any]:
        """Return the request, averages per adaptation step, and a row per step and task, as JSON data."""
        return {
            "updates": self.updates,
            "tasks_are_new": self.tasks_are_new,
            "drawn_from": self.drawn_from,
            "extrapolation": self.extrapolation or None,
            "env_steps": self.env_steps,
            "evaluation": self.config.evaluation.model_dump(mode="json", exclude={"every"}),
            "adaptation": [as_json(step.columns) for step in self.summary()],
            "tasks": as_json(self.table().to_pylist()),
            "classes": [{"adaptation_steps": row.pop("step"), **row} for row in class_rows(self.by_class())],
            "success": success_rows(self.evaluation, self.classes),
        }

    def summary(self) -> list[AdaptationSummary]:
        """Return averages over tasks for each number of adaptation steps."""
        return summarize_steps(self.evaluation, self.classes)

    def by_class(self) -> ByStep:
        """Return the test returns per task class after each number of adaptation steps; empty without classes."""
        return summarize_classes(self.evaluation, self.classes)
