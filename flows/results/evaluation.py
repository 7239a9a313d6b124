"""Returns of a learner after 0 ... K adaptation steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from metaloom.flows.formatting import finite, number, plural
from metaloom.flows.results.class_returns import ByStep, class_rows
from metaloom.flows.results.evaluation_summary import (
    AdaptationSummary,
    summarize_classes,
    summarize_steps,
    summarize_tasks,
)
from metaloom.flows.results.success import success_rows
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.task_classes import Classes
from metaloom.pipeline.shown import Row, Shown
from metaloom.pipeline.types import Evaluation, TaskBatch

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class EvaluationOutcome(Shown):
    """A learner's returns after 0 ... K adaptation steps.

    Attributes:
        run: Name of the run.
        updates: Number of updates of the learner.
        config: Configuration of the run, with the requested evaluation.
        evaluation: The returns.
        tasks_are_new: True if none of its tasks occurs in training.
        drawn_from: Number of tasks that its tasks were chosen from; None if they come from a distribution.
        classes: Task classes that the environment declares.
        draw: Draws the returns.
    """

    run: str
    updates: int
    config: RunConfig
    evaluation: Evaluation
    tasks_are_new: bool
    drawn_from: int | None
    classes: Classes | None
    draw: "Callable[[EvaluationOutcome], Figure]" = field(compare=False)

    def shown(self) -> tuple[str, list[Row]]:
        """Return over tasks after every number of adaptation steps, with its interval; see pipeline.shown."""
        updates = plural(self.updates, "update")
        rows = [
            (str(s.adaptation_steps), number(s.average_return), f"{number(s.average_low)} to {number(s.average_high)}")
            for s in self.summary()
        ]
        tests = f"{plural(self.evaluation.test_returns.shape[2], 'test episode')} each"
        tests += f"; {self.extrapolation}" if self.extrapolation else ""
        return (
            f"EvaluationOutcome of {self.run} after {updates}: {self.counted_tasks}, {tests}",
            [("adaptation steps", "average return", "95 % interval"), *rows],
        )

    @property
    def tasks(self) -> TaskBatch:
        """The tasks."""
        return self.evaluation.tasks

    @property
    def counted_tasks(self) -> str:
        """The number of tasks and, for a selection, of all: "10 tasks (of 80)"."""
        count = len(self.tasks)
        return plural(count, "task") + (f" (of {self.drawn_from:,})" if count < (self.drawn_from or 0) else "")

    @property
    def env_steps(self) -> int:
        """Environment steps that the evaluation took; training does not count them."""
        return self.evaluation.num_steps

    @property
    def extrapolation(self) -> str:
        """Warning that some steps exceed the number in training, or empty. PEARL trains for no fixed number."""
        algorithm = self.config.algorithm
        trained = algorithm.evaluation_steps
        if algorithm.graph == "task_inference" or self.evaluation.adaptation_steps <= trained:
            return ""
        return f"trained for {plural(trained, 'step')}; later rows extrapolate"

    def plot(self) -> "Figure":
        """Draw returns against adaptation episodes as a matplotlib figure."""
        return self.draw(self)

    def table(self) -> pa.Table:
        """Return one row per adaptation step and task; see `flows/results/evaluation_summary.py`."""
        return pa.Table.from_pylist(summarize_tasks(self.evaluation))

    def as_dict(self) -> dict[str, Any]:
        """Return what was asked for, averages by adaptation step, and a row per step and task, as plain data."""
        return {
            "updates": self.updates,
            "tasks_are_new": self.tasks_are_new,
            "drawn_from": self.drawn_from,
            "extrapolation": self.extrapolation or None,
            "env_steps": self.env_steps,
            "evaluation": self.config.evaluation.model_dump(mode="json", exclude={"every"}),
            "adaptation": [_finite(step.columns) for step in self.summary()],
            "tasks": [_finite(row) for row in self.table().to_pylist()],
            "classes": [{"adaptation_steps": row.pop("step"), **row} for row in class_rows(self.by_class())],
            "success": success_rows(self.evaluation, self.classes),
        }

    def summary(self) -> list[AdaptationSummary]:
        """Averages over tasks for every number of adaptation steps."""
        return summarize_steps(self.evaluation, self.classes)

    def by_class(self) -> ByStep:
        """Test returns by class of task after every number of adaptation steps; nothing without classes."""
        return summarize_classes(self.evaluation, self.classes)


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: finite(value) if isinstance(value, float) else value for name, value in row.items()}
