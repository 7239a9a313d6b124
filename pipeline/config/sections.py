"""Sections of RunConfig on the storage of a run and its start."""

from typing import Any, Literal

from pydantic import Field, model_validator

from metaloom.pipeline.schema import Settings, later


class EvaluationConfig(Settings):
    """Evaluation of a learner on tasks, while it trains and by default in `metaloom evaluate`."""

    every: int | None = Field(default=None, ge=1)
    """Evaluate after every N updates of training; null: never. Training gives the same bits either way."""
    tasks: Literal["held-out", "train"] | tuple[tuple[float, ...], ...] = "held-out"
    """held-out: the environment's test tasks, or draws that training never made. train: its fixed set, or the tasks of
    the last iteration. Or the tasks themselves, as lists of values."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Number of tasks; null: the training number for the training set or a distribution, else each task once."""
    evenly_by: str | None = None
    """Draw evenly from the classes of a fixed set, by the task field of this name; without num_tasks one of each."""
    task_sampling: Literal["uniform", "balanced"] = later("uniform")
    """balanced: draw equally many tasks of every class that the environment declares, num_tasks in all or the number in
    training."""
    adaptation_steps: int | None = Field(default=None, ge=0)
    """Largest number of adaptation steps; null: as in training. Past training's steps, its last step size holds."""
    episodes: int | None = Field(default=None, ge=1)
    """Episodes per task that every step adapts to; null: as in training."""
    test_episodes: int | None = Field(default=None, ge=1)
    """Episodes per task that test the policy after every step, and are never adapted to; null: as in training."""
    deterministic: bool = False
    """Test episodes take the most likely action. Episodes of a gradient step always explore; episodes that a task is
    inferred from act as the test episodes do, under RL2 and VariBAD unless `remembered` says otherwise."""
    remembered: Literal["as-tested", "drawn"] | None = later(None)
    """Only for policies with a memory: how they act in the episodes they remember. null or as-tested: as in test
    episodes, so that the returns after 0 ... K episodes are the returns of one trial; drawn: they always explore."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the drawn tasks and episodes, independent of all random draws of training."""

    @model_validator(mode="after")
    def _tasks_are_a_table(self) -> "EvaluationConfig":
        if not isinstance(self.tasks, str) and len({len(task) for task in self.tasks}) != 1:
            raise ValueError(
                f"tasks has rows of lengths {sorted({len(task) for task in self.tasks})}; required equal lengths"
            )
        if self.task_sampling == "balanced" and self.evenly_by is not None:
            raise ValueError(f"task_sampling is balanced but evenly_by is {self.evenly_by}; leave one of them out")
        return self


class RetentionConfig(Settings):
    """Iterations that keep all their batches on disk. The rest can be recomputed; no number depends on it.

    With neither `keep_last` nor `keep_every` all are kept; with both, an iteration is kept if either keeps it.
    """

    keep_last: int | None = Field(default=None, ge=0)
    """Keep the batches of the newest N iterations."""
    keep_every: int | None = Field(default=None, ge=1)
    """Keep the batches of every Nth iteration, from iteration 0 on."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Stop before the run's files hold more than this many bytes; warn at 90 %."""


class ReplayConfig(Settings):
    """Reading of the replay buffer, which is the stored run, by off-policy algorithms. No number depends on it."""

    cache_mib: int = Field(default=1024, ge=1)
    """Mebibytes of the newest transitions to keep in memory; older ones are read from the store."""


class WarmStart(Settings):
    """The learner of a stored run that another run starts from.

    A bare string stands for the run, with the number of updates after an @.
    """

    run: str = Field(min_length=1)
    """The run's folder, or its name."""
    updates: int | None = Field(default=None, ge=0)
    """Number of updates of the learner; by default, all that exist when the run starts, recorded then."""
    digest: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """Digest of the output that holds the learner; recorded when the run starts, and checked at every read."""

    @model_validator(mode="before")
    @classmethod
    def _accept_a_bare_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        run, at, updates = value.rpartition("@")
        return {"run": run, "updates": int(updates)} if at and updates.isdecimal() else {"run": value}
