"""Description of a trained policy: everything that the policy needs from its run besides parameters."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Tuple
from gymnasium.wrappers import TimeLimit

from metaloom.pipeline.algorithms.contract import AnyLearner, Setup
from metaloom.pipeline.building import setup_for
from metaloom.pipeline.config.run import RunConfig, build_stored
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.envs.facts import described_parts, described_space, parts_from, space_from, taken_space
from metaloom.pipeline.envs.flattening import flat
from metaloom.pipeline.envs.outer_wrappers import in_wrappers, wrapper_class
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.envs.spaces import spaces_of
from metaloom.pipeline.envs.wrappers import (
    ActionSpace,
    AnyActionMap,
    PolicyActions,
    SingleTask,
    action_map,
    is_bounded,
    observe_places,
)
from metaloom.pipeline.nn.spec import Spaces


@dataclass(frozen=True)
class Blueprint:
    """Settings of a run and spaces of its environment, from which its policy can be built."""

    config: RunConfig
    spaces: Spaces  # sizes of the policy's observations and actions
    actions: ActionSpace  # action space of the environment, to which the policy's actions are mapped
    parts: gymnasium.Space[Any] | None = None  # observation space before flattening; None for a Box, and in old files
    # The learner's run, iteration and digest, and the names and units of components; see `policy_of`.
    origin: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, config: RunConfig) -> "Blueprint":
        """Return the policy blueprint for a run with this configuration."""
        with closing(make_env(config.env)) as env:
            assert isinstance(env, PolicyActions)
            parts = None if isinstance(env.unflattened, Box) else env.unflattened
            return cls(config, spaces_of(env), taken_space(env), parts)

    @property
    def action_map(self) -> AnyActionMap:
        """Function that maps the policy's actions to the environment's action space."""
        return action_map(self.actions, self.config.env.action_scale)

    def flattened(self, observation: Any) -> Any:
        """Return a composite observation flattened as the policy expects it, and any other observation unchanged."""
        space = self.parts
        if isinstance(space, Dict | Tuple):
            in_parts = isinstance(observation, Mapping | tuple)
        else:
            in_parts = space is not None and np.shape(observation) == space.shape
        return flat(space, observation) if space is not None and in_parts else observation

    def setup(self) -> Setup:
        """Return the setup from which the algorithm builds its learner."""
        config = self.config
        return setup_for(config, self.spaces, lambda rewards: make_env(config.env).sparse_rewards(rewards))

    def learner(self) -> AnyLearner:
        return self.config.algorithm.build(self.setup())

    def wrap(self, env: gymnasium.Env[Any, Any]) -> PolicyActions:
        """Return a custom environment wrapped so that it accepts the policy's actions.

        Raises TypeError if `env` is not an environment, and ValueError if its spaces differ from the run's.
        """
        # Check the type, since notebooks are not type-checked.
        if not isinstance(env, gymnasium.Env):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"cannot adapt to {env!r}; pass a gymnasium.Env, or episodes as an EpisodeBatch")
        if isinstance(env, PolicyActions):
            inner: MetaEnv = env.env
        else:
            wrappers = self.config.env.wrappers
            if twice := [w.name for w in wrappers if wrapper_class(w) in _layers(env)]:
                raise ValueError(
                    f"the environment is already wrapped in {twice[0]}; pass it without that, since the run's "
                    "env.wrappers are added here"
                )
            around, observed = in_wrappers(env, wrappers), self.config.env.observed
            if observed is not None and around.observation_space.shape != self.spaces.observation_shape:
                around = observe_places(around, observed)
            inner = around if isinstance(around, MetaEnv) else SingleTask(around)
        # Check before scaling actions, which fails for other kinds of action spaces.
        found, actions = spaces_of(plain := PolicyActions(inner, None)), taken_space(plain)
        if found != self.spaces:
            raise ValueError(
                f"{type(env.unwrapped).__name__}: got {_sizes(found)}; expected {_sizes(self.spaces)}, as in "
                f"{self.config.env.name}, which the policy was trained in"
            )
        if not _same_actions(actions, self.actions):
            raise ValueError(
                f"{type(env.unwrapped).__name__}: got the action space {actions}; expected {self.actions}, as in "
                f"{self.config.env.name}, which the policy was trained in{_remedy(actions, self.actions)}"
            )
        return PolicyActions(inner, self.config.env.action_scale)

    def to_json(self) -> dict[str, Any]:
        actions = described_space(self.actions)
        found = {"config": self.config.model_dump(mode="json"), "spaces": asdict(self.spaces), "actions": actions}
        return found if self.parts is None else {**found, "parts": described_parts(self.parts)}

    @classmethod
    def from_json(cls, described: dict[str, Any]) -> "Blueprint":
        """Return the blueprint that `to_json` described.

        Raises:
            KeyError, TypeError, ValueError: the data are invalid.
            ConfigError: the settings are not valid for a run.
        """
        sizes = described["spaces"]
        spaces = Spaces(tuple(sizes.pop("observation_shape")), **sizes)
        parts = parts_from(described["parts"]) if "parts" in described else None
        return cls(build_stored(described["config"]), spaces, space_from(described["actions"]), parts)


def _layers(env: gymnasium.Env[Any, Any]) -> Iterator[type]:
    """Yield the classes of an environment's wrappers, none of which may be applied twice."""
    while isinstance(env, gymnasium.Wrapper):
        if not isinstance(env, TimeLimit):  # added by gymnasium.make
            yield type(env)
        env = env.env


def _same_actions(found: ActionSpace, required: ActionSpace) -> bool:
    """Return True if two action spaces are equal up to floating-point precision."""
    if isinstance(found, Box) and isinstance(required, Box):
        return np.allclose(found.low, required.low) and np.allclose(found.high, required.high)
    return found == required


def _remedy(found: ActionSpace, required: ActionSpace) -> str:
    """Return advice on how to rescale an action box, for error messages, or an empty string."""
    if not (isinstance(found, Box) and isinstance(required, Box) and found.shape == required.shape):
        return ""
    if not (is_bounded(found) and is_bounded(required)):
        return ""
    ends = {"min_action": required.low, "max_action": required.high}
    bounds = ", ".join(f"{name}=np.{required.dtype}({values.tolist()})" for name, values in ends.items())
    return f"; wrap it: gymnasium.wrappers.RescaleAction(env, {bounds})"


def _sizes(spaces: Spaces) -> str:
    actions = f"{spaces.num_actions} discrete actions" if spaces.num_actions else f"{spaces.action_size} actions"
    scale = "" if spaces.observation_scale == 1 else f", divided by {spaces.observation_scale:g},"
    return f"observations of shape {spaces.observation_shape}{scale} and {actions}"
