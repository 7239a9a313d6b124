"""Which environment a run uses, as plain data: workers read it without importing torch."""

import re
from typing import Any

from pydantic import Field, JsonValue, model_validator

from metaloom.pipeline.schema import Settings


class EnvConfig(Settings):
    """An environment by name, with its options.

    A bare string stands for the name: `--set env=point-corner`.
    """

    name: str = Field(min_length=1)
    """A registered name such as half-cheetah-dir, or module:Class for an environment of your own."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the environment's class, for example reward: dense."""
    action_scale: float | None = Field(default=10.0, gt=0)
    """The policy's box [-action_scale, action_scale] is mapped onto the environment's; null lets it act directly, which
    it always does where actions are discrete, and by default under an actor-critic."""

    @model_validator(mode="before")
    @classmethod
    def _accept_a_bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


def gymnasium_limit(name: str) -> int | None:
    """The step limit that gymnasium has for an environment of its own; None for others and where there is none."""
    # Names of our own and module:Class are told apart without importing gymnasium.
    if not re.fullmatch(r"(?:[\w.-]+/)?[\w.-]+-v\d+", name):
        return None
    import gymnasium

    spec = gymnasium.registry.get(name)
    return None if spec is None else spec.max_episode_steps
