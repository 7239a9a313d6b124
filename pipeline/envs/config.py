"""Which environment a run uses, as plain data: workers read it without importing torch."""

from typing import Any

from pydantic import Field, JsonValue, model_validator

from pipeline.schema import Settings


class EnvConfig(Settings):
    """An environment by name, with its options.

    A bare string stands for the name: `--set env=point-corner`.
    """

    name: str = Field(min_length=1)
    """A registered name such as half-cheetah-dir, or module:Class for an environment of your own."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the environment's class, for example reward: dense."""
    action_scale: float | None = Field(default=10.0, gt=0)
    """The policy's box [-action_scale, action_scale] is mapped onto the environment's; null lets it act directly."""

    @model_validator(mode="before")
    @classmethod
    def _accept_a_bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value
