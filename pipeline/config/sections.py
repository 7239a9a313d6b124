"""Sections of RunConfig that say what a run keeps and what it starts from."""

from typing import Any

from pydantic import Field, model_validator

from metaloom.pipeline.schema import Settings


class RetentionConfig(Settings):
    """Iterations that keep all their batches on disk. The rest can be recomputed; no number depends on it.

    With neither `keep_last` nor `keep_every` all are kept; with both, those that either keeps.
    """

    keep_last: int | None = Field(default=None, ge=0)
    """Keep the batches of so many of the newest iterations."""
    keep_every: int | None = Field(default=None, ge=1)
    """Keep the batches of every so many-th iteration, from iteration 0 on."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Stop before the run's files hold more than this; warn at 90 %."""


class ReplayConfig(Settings):
    """Reading of the replay buffer, which is the stored run, by off-policy algorithms. No number depends on it."""

    cache_mib: int = Field(default=1024, ge=1)
    """Mebibytes of the newest transitions that are kept at hand; older ones are read from the store."""


class WarmStart(Settings):
    """The learner of a stored run that another run starts from.

    A bare string stands for the run, with the number of updates behind an @.
    """

    run: str = Field(min_length=1)
    """The run's folder, or its name."""
    updates: int | None = Field(default=None, ge=0)
    """Number of updates that the learner has had; by default all that there are when the run starts, recorded then."""
    digest: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """Of the output that holds the learner; recorded when the run starts, and checked whenever it is read again."""

    @model_validator(mode="before")
    @classmethod
    def _accept_a_bare_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        run, at, updates = value.rpartition("@")
        return {"run": run, "updates": int(updates)} if at and updates.isdecimal() else {"run": value}
