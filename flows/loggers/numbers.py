"""Metrics of an iteration under grouped names, for loggers and exports."""

import math

import numpy as np

from metaloom.flows.formatting import last_return
from metaloom.flows.observer import IterationReport
from metaloom.flows.results.class_returns import BALANCED, named_estimates
from metaloom.pipeline.types import Array


def scalars(report: IterationReport) -> dict[str, float]:
    """Return all metrics of an iteration, keyed by grouped name.

    Groups are inner steps (`step_1/average_return`), `update`, `by_class` with returns per task class
    (`by_class/step_1.forward`), and `evaluation` with test returns (`evaluation/after_2_steps`).
    """
    by_class: dict[str, float] = {}
    for k, returns in enumerate(report.class_returns):
        by_class |= {f"by_class/step_{k}.{name}": found.mean for name, _, found in named_estimates(returns)}
        by_class[f"by_class/step_{k}.{BALANCED}_standard_error"] = returns.balanced.standard_error
    return {
        **{_grouped(name): value for name, value in report.metrics.items()},
        **{name: value for name, value in by_class.items() if math.isfinite(value)},
        **{f"evaluation/after_{k}_steps": value for k, value in enumerate(report.evaluation_returns)},
    }


def timings(report: IterationReport) -> dict[str, float]:
    """Return the duration of each of an iteration's stages in seconds, and the sampling speed."""
    seconds = {f"time/{stage}": value for stage, value in report.stage_seconds.items()}
    return seconds if report.steps_per_second is None else seconds | {"time/steps_per_second": report.steps_per_second}


def distributions(report: IterationReport) -> dict[str, Array]:
    """Return the per-task mean returns at each inner step, [B] each, keyed by name."""
    return {f"step_{k}/task_returns": np.asarray(returns) for k, returns in enumerate(report.task_returns)}


def return_name(report: IterationReport) -> str | None:
    """Return the grouped name of the average return after the last inner step, or None if there is none."""
    name = last_return(report.metrics)
    return None if name is None else _grouped(name)


def _grouped(metric: str) -> str:
    group, dot, name = metric.partition(".")
    return f"{group}/{name}" if dot else f"update/{metric}"
