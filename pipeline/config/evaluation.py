"""Settings of evaluations, as plain data."""

from typing import Literal

from pydantic import Field, model_validator

from metaloom.pipeline.schema import Settings, later


class EvaluationConfig(Settings):
    """Evaluation of a learner on tasks, while it trains and by default in `metaloom evaluate`."""

    every: int | None = Field(default=None, ge=1)
    """Evaluate after every so many updates of training; null: never. Training gives the same bits either way."""
    tasks: Literal["held-out", "train"] | tuple[tuple[float, ...], ...] = "held-out"
    """held-out: the environment's test tasks, or draws that training never made. train: its fixed set, or the tasks of
    the last iteration. Or the tasks themselves, as lists of numbers."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Tasks to draw; null: from the training set or a distribution as many as in training, else each task once."""
    evenly_by: str | None = None
    """Draw evenly from the classes of a fixed set, by the task field of this name; without num_tasks one of each."""
    task_sampling: Literal["uniform", "balanced"] = later("uniform")
    """balanced: draw equally many tasks of every class that the environment declares, num_tasks in all or as many as in
    training."""
    adaptation_steps: int | None = Field(default=None, ge=0)
    """Largest number of adaptation steps; null: as in training. Beyond those of training, its last step size holds."""
    episodes: int | None = Field(default=None, ge=1)
    """Episodes per task that every step adapts to; null: as in training."""
    test_episodes: int | None = Field(default=None, ge=1)
    """Episodes per task that test the policy after every step, and are never adapted to; null: as in training."""
    deterministic: bool = False
    """Test episodes take the most likely action. Those of a gradient step always explore; those that a task is inferred
    from act as the test episodes do, under RL2 and VariBAD unless `remembered` says otherwise."""
    remembered: Literal["as-tested", "drawn"] | None = later(None)
    """Only for policies with a memory, of the episodes that they remember: null or as-tested, actions are those of test
    episodes, so that the returns after 0 ... K episodes are those of a trial; drawn: they always explore."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides which tasks and episodes are drawn, independently of all that training draws."""

    @model_validator(mode="after")
    def _tasks_are_a_table(self) -> "EvaluationConfig":
        if not isinstance(self.tasks, str) and len({len(task) for task in self.tasks}) != 1:
            raise ValueError(f"tasks has rows of {sorted({len(task) for task in self.tasks})} numbers; give one length")
        if self.task_sampling == "balanced" and self.evenly_by is not None:
            raise ValueError(f"task_sampling is balanced but evenly_by is {self.evenly_by}; leave one of them out")
        return self
