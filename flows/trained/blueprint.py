"""Description of a trained policy: all of its run that it needs besides its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.building import setup_for
from metaloom.pipeline.config.run import RunConfig, build_stored
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.envs.spaces import spaces_of
from metaloom.pipeline.envs.wrappers import ActionMap, DiscreteActionMap, PolicyActions, SingleTask, action_map
from metaloom.pipeline.nn.spec import Spaces

ActionSpace = Box | Discrete


@dataclass(frozen=True)
class Blueprint:
    """The settings of a run, and the sizes of its environment, so that its policy can be built without either.

    Attributes:
        config: of the run.
        spaces: sizes of what the policy sees and gives.
        actions: what the environment takes, which the policy's actions are mapped to.
        origin: Run, iteration and digest of the learner, and names and units of components, as `policy_of` finds them.
    """

    config: RunConfig
    spaces: Spaces
    actions: ActionSpace
    origin: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, config: RunConfig) -> Blueprint:
        """Describe the policy of a run.

        Raises:
            EnvError: the run's environment cannot be made.
        """
        env = make_env(config.env)
        try:
            assert isinstance(env, PolicyActions)
            return cls(config, spaces_of(env), _action_space(env.env))
        finally:
            env.close()

    @property
    def action_map(self) -> ActionMap | DiscreteActionMap:
        """Maps what the policy gives to what the environment takes."""
        return action_map(self.actions, self.config.env.action_scale)

    def learner(self) -> Learner[Any, Any]:
        """Build the algorithm, which knows how to adapt."""
        config = self.config
        setup = setup_for(config, self.spaces, lambda rewards: make_env(config.env).sparse_rewards(rewards))
        return config.algorithm.build(setup)

    def wrap(self, env: gymnasium.Env[Any, Any]) -> PolicyActions:
        """Have an environment of the user's take the policy's actions.

        Raises:
            TypeError: it is no environment.
            ValueError: it shows or takes something else than the environment of the run.
        """
        # Nobody checks the types of a notebook.
        if not isinstance(env, gymnasium.Env):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"found {env!r} to adapt to; required a gymnasium.Env, or episodes as an EpisodeBatch")
        inner: MetaEnv = env if isinstance(env, MetaEnv) else SingleTask(env)
        if isinstance(inner, PolicyActions):
            inner = inner.env
        # Before the actions are scaled, which those of another kind cannot be.
        found, actions = spaces_of(PolicyActions(inner, None)), _action_space(inner)
        if found != self.spaces:
            raise ValueError(
                f"{type(env.unwrapped).__name__}: found {_sizes(found)}; required {_sizes(self.spaces)}, as in "
                f"{self.config.env.name}, which the policy was trained in"
            )
        if not _same_actions(actions, self.actions):
            raise ValueError(
                f"{type(env.unwrapped).__name__}: found the action space {actions}; required {self.actions}, that of "
                f"{self.config.env.name}, which the policy was trained in; wrap it, for example in "
                "gymnasium.wrappers.RescaleAction"
            )
        return PolicyActions(inner, self.config.env.action_scale)

    def to_json(self) -> dict[str, Any]:
        """Describe it in numbers and strings."""
        actions = self.actions
        if isinstance(actions, Discrete):
            described: dict[str, Any] = {"n": int(actions.n), "start": int(actions.start)}
        else:
            described = {"low": actions.low.tolist(), "high": actions.high.tolist(), "dtype": str(actions.dtype)}
        return {"config": self.config.model_dump(mode="json"), "spaces": asdict(self.spaces), "actions": described}

    @classmethod
    def from_json(cls, described: dict[str, Any]) -> Blueprint:
        """Read what `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
            ConfigError: the settings are not those of a run.
        """
        actions, sizes = described["actions"], described["spaces"]
        shape = tuple(sizes.pop("observation_shape"))
        spaces = Spaces(shape, **sizes)
        if "n" in actions:
            space: ActionSpace = Discrete(actions["n"], start=actions["start"])
        else:
            dtype = np.dtype(actions["dtype"]).type
            space = Box(np.array(actions["low"], dtype), np.array(actions["high"], dtype), dtype=dtype)
        return cls(build_stored(described["config"]), spaces, space)


def _action_space(env: MetaEnv) -> ActionSpace:
    space = env.action_space
    assert isinstance(space, Box | Discrete), "PolicyActions has refused others"
    return space


def _same_actions(found: ActionSpace, required: ActionSpace) -> bool:
    """Tell whether actions mean the same, in whatever precision."""
    if isinstance(found, Box) and isinstance(required, Box):
        return np.allclose(found.low, required.low) and np.allclose(found.high, required.high)
    return found == required


def _sizes(spaces: Spaces) -> str:
    actions = f"{spaces.num_actions} discrete actions" if spaces.num_actions else f"{spaces.action_size} actions"
    scale = "" if spaces.observation_scale == 1 else f", divided by {spaces.observation_scale:g},"
    return f"observations of shape {spaces.observation_shape}{scale} and {actions}"
