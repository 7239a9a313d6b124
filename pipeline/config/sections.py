"""Sections of RunConfig on evaluation, storage and warm starts."""

from typing import Any, Literal

from pydantic import Field, model_validator

from metaloom.pipeline.schema import Settings, later


class EvaluationConfig(Settings):
    """Evaluation during training, and defaults of `metaloom evaluate`."""

    every: int | None = Field(default=None, ge=1)
    """Evaluate after every N updates of training; null: never. Training is not affected."""
    tasks: Literal["held-out", "train"] | tuple[tuple[float, ...], ...] = "held-out"
    """held-out: the environment's test tasks, or new draws. train: its training set, or the tasks of the last
    iteration. Or the tasks themselves, as lists of values."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Number of tasks; null: as in training for training tasks and distributions, otherwise each task once."""
    evenly_by: str | None = None
    """Task field whose values divide a fixed set into classes, drawn evenly; without num_tasks, one task of each."""
    task_sampling: Literal["uniform", "balanced"] = later("uniform")
    """balanced: draw equally many tasks of every class that the environment declares, num_tasks in all or the number in
    training."""
    adaptation_steps: int | None = Field(default=None, ge=0)
    """Number of adaptation steps; null: as in training. Additional steps use the last step size."""
    episodes: int | None = Field(default=None, ge=1)
    """Episodes per task and adaptation step; null: as in training."""
    test_episodes: int | None = Field(default=None, ge=1)
    """Test episodes per task after every step, not used for adaptation; null: as in training."""
    deterministic: bool = False
    """Test episodes take the most likely action. Episodes for a gradient step always explore. Episodes for inference
    act as the test episodes do, except where `remembered` applies (RL2, VariBAD)."""
    remembered: Literal["as-tested", "drawn"] | None = later(None)
    """For policies with a memory: actions in remembered episodes. null or as-tested: as in test episodes, so that
    returns after 0 ... K episodes belong to one trial; drawn: sampled, to explore."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the drawn tasks and episodes, independent of all random draws of training."""

    @model_validator(mode="after")
    def _tasks_are_a_table(self) -> "EvaluationConfig":
        if not isinstance(self.tasks, str) and len({len(task) for task in self.tasks}) != 1:
            raise ValueError(
                f"tasks has rows of lengths {sorted({len(task) for task in self.tasks})}; required equal lengths"
            )
        if self.task_sampling == "balanced" and self.evenly_by is not None:
            raise ValueError(f"task_sampling is balanced but evenly_by is {self.evenly_by}; remove one of them")
        return self


class RetentionConfig(Settings):
    """Iterations whose batches are all kept on disk. The rest can be recomputed; results do not change.

    Without `keep_last` and `keep_every`, all are kept; with both, an iteration is kept if either keeps it.
    """

    keep_last: int | None = Field(default=None, ge=0)
    """Keep the batches of the newest N iterations."""
    keep_every: int | None = Field(default=None, ge=1)
    """Keep the batches of every Nth iteration, starting with iteration 0."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Stop before the run's files hold more than this many bytes; warn at 90 %."""


class ReplayConfig(Settings):
    """Settings for reading stored transitions. Results do not depend on them."""

    cache_mib: int = Field(default=1024, ge=1)
    """Mebibytes of the newest transitions to keep in memory; older ones are read from the store."""


class WarmStart(Settings):
    """Learner of a stored run from which another run starts.

    A bare string is the run, optionally followed by @ and the number of updates.
    """

    run: str = Field(min_length=1)
    """Folder or name of the run."""
    updates: int | None = Field(default=None, ge=0)
    """Number of updates of the learner; by default the latest, recorded when the run starts."""
    digest: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """Digest of the stored learner, recorded when the run starts and checked on every read."""

    @model_validator(mode="before")
    @classmethod
    def _accept_a_bare_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        run, at, updates = value.rpartition("@")
        return {"run": run, "updates": int(updates)} if at and updates.isdecimal() else {"run": value}
