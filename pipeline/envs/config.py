"""Settings for a run's environment. This module does not import torch."""

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from metaloom.pipeline.envs import ENVS
from metaloom.pipeline.plugins import import_module
from metaloom.pipeline.schema import ConfigError, Settings, later

DISCRETE = ("bernoulli-bandit", "hidden-goal-grid", "tabular-mdp")
"""Built-in environments with discrete actions, for which action_scale defaults to null."""


class InfoFact(Settings):
    """A fact that a plain gymnasium environment reports in `info` at every step.

    A bare string sets the key: `--set env.facts.success=is_success`.
    """

    short_for = "key"
    key: str = Field(min_length=1)
    """Key of the fact in info."""
    kind: Literal["flag", "number"] = "flag"
    """flag: True or False, 1 or 0; number: a finite number."""
    per: Literal["step", "episode"] = "step"
    """step: stored for every step; episode: stored only for the last step of an episode."""


class WrapperConfig(Settings):
    """An environment wrapper and its options.

    A bare string sets the name: `--set env.wrappers=[FlattenObservation]`.
    """

    short_for = "name"
    name: str = Field(min_length=1)
    """Class in gymnasium.wrappers, such as TimeAwareObservation, or module:Class of another gymnasium.Wrapper."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the class, other than the environment."""

    @property
    def path(self) -> str:
        """Path of the wrapper class, module:Class."""
        return self.name if ":" in self.name else f"gymnasium.wrappers:{self.name}"


class EnvConfig(Settings):
    """An environment, selected by name, and its options. A bare string sets the name: `--set env=point-corner`."""

    short_for = "name"
    name: str = Field(min_length=1)
    """A registered name such as half-cheetah-dir, a gymnasium id such as Hopper-v5 or module:Hopper-v5, or
    module:Class for a custom environment."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the environment's class, for example reward: dense."""
    action_scale: float | None = Field(default=10.0, gt=0)
    """Map the policy's box [-action_scale, action_scale] onto the environment's action box. null passes actions
    unchanged, which is the default for actor-critics and the only choice for discrete actions."""
    diagnostics: bool = later(False)
    """Store the environment's diagnostics for each rollout batch, such as forward_velocity, among the metrics."""
    facts: dict[str, InfoFact] = later({})
    """Facts to store from the info of a plain gymnasium environment, as name: key, such as success: is_success. A
    MetaEnv declares its own facts."""
    wrappers: tuple[WrapperConfig, ...] = later(())
    """Wrappers around the environment, innermost first, such as [FlattenObservation] or [{name: my_module:Class,
    options: {key: value}}]."""
    observed: tuple[Annotated[int, Field(ge=0)], ...] | None = later(None, min_length=1)
    """Indices of the observation entries that the policy sees, such as [0, 2] for a cart-pole without velocities; null:
    all. Only for plain gymnasium environments."""
    integer_observations: bool = later(True, before=False)
    """Store integer observations, such as image bytes, in their own dtype; false: as float32."""
    copies: Literal["auto", "kept", "fresh"] = later("auto", before="kept")
    """Copies of a third-party environment. kept: reused across episodes. fresh: new for each episode, which is slower.
    auto: fresh if a rehearsal before the run finds that episodes depend on earlier ones, otherwise kept."""
    seed_bits: Literal[32, 64] = later(32, before=64)
    """Number of bits in reset seeds. Many simulators are limited to 32; built-in environments use 64."""
    witness: bool = later(True, before=False)
    """Replay one episode per iteration on a new copy and report in the metric witness_reproduced whether it is bitwise
    identical. Off by default for built-in environments."""

    @property
    def is_built_in(self) -> bool:
        """True if no third-party code is involved."""
        return self.name in ENVS and not self.wrappers

    @property
    def left_open(self) -> set[str]:
        """Names of unset settings whose default differs between third-party and built-in environments."""
        return self.before().keys() - self.model_fields_set

    def as_in(self, stored: Mapping[str, Any]) -> "EnvConfig":
        """Return this configuration with the settings in `left_open` taken from a stored run's env section."""
        known = {**self.before(), **stored}
        return self.model_copy(update={name: known[name] for name in self.left_open})

    @field_validator("observed")
    @classmethod
    def _sees_nothing_twice(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and len(set(value)) < len(value):
            raise ValueError(f"got {list(value)}; each index may appear only once")
        return value

    @model_validator(mode="after")
    def _built_in_ones_stay_as_they_were(self) -> "EnvConfig":
        if self.is_built_in:
            for name, value in type(self).before().items():
                if name not in self.model_fields_set:
                    object.__setattr__(self, name, value)
        return self

    @model_validator(mode="after")
    def _discrete_actions_have_no_scale(self) -> "EnvConfig":
        if self.name in DISCRETE and "action_scale" not in self.model_fields_set:
            # Settings are frozen, but this is part of their construction.
            object.__setattr__(self, "action_scale", None)
            self.model_fields_set.add("action_scale")  # mark it as set, so that no algorithm's default replaces it
        return self


def is_gymnasium_id(name: str) -> bool:
    """Return True if a name looks like a gymnasium id, [module:][namespace/]Name-v0; does not import gymnasium."""
    return re.fullmatch(r"(?:[\w.]+:)?(?:(?:[\w.-]+/)?[\w.-]+-v\d+|[\w.-]+/[\w.-]+)", name) is not None


def registered_id(name: str) -> str | None:
    """Return an environment's gymnasium id after importing its module, or None if the name is not a registered id.

    Ids may lack a version, so a name that the module does not define may be an id that it registered.
    """
    own = name.rpartition(":")[2]
    if ":" in name and hasattr(import_module(name), own.partition(".")[0]):
        return None
    import gymnasium  # imported here, since the import would take a seventh of the time needed to reject a typo

    return own if own in gymnasium.registry else None


_ASKED = ContextVar("_ASKED", default=True)


@contextmanager
def step_limits_left_open() -> Generator[None]:
    """Within the block, skip the lookup of gymnasium's step limits, for callers that only read settings."""
    token = _ASKED.set(False)
    try:
        yield
    finally:
        _ASKED.reset(token)


def gymnasium_limit(name: str) -> int | None:
    """Return an environment's step limit in gymnasium; None if it has none, or within `step_limits_left_open`."""
    # A lower-case name is a misspelled built-in environment, which is rejected earlier.
    if not _ASKED.get() or name in ENVS or (re.fullmatch("[a-z0-9-]+", name) and not is_gymnasium_id(name)):
        return None
    try:
        known = registered_id(name)
    except ConfigError:
        if is_gymnasium_id(name):
            raise
        return None  # building the environment will report the reason
    import gymnasium  # as above

    return None if known is None else gymnasium.registry[known].max_episode_steps
