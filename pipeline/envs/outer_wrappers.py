"""Wrappers named in a configuration, for any kind of environment."""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import gymnasium
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, RecordVideo

from metaloom.pipeline.envs.answers import is_ctrl_c, last_line
from metaloom.pipeline.envs.config import WrapperConfig
from metaloom.pipeline.envs.contract import EnvError, MetaEnv
from metaloom.pipeline.envs.wrappers import WithTasks
from metaloom.pipeline.plugins import load_class
from metaloom.pipeline.schema import ConfigError, suggestion
from metaloom.pipeline.types import Array

STATISTICS: dict[type[gymnasium.Env[Any, Any]], str] = {
    NormalizeObservation: "policy.normalize_observations=true",
    NormalizeReward: "processing.scale_rewards=true",
}
"""Settings to use instead of wrappers that keep statistics over episodes, keyed by wrapper."""


def in_wrappers(env: gymnasium.Env[Any, Any], wrappers: Sequence[WrapperConfig]) -> gymnasium.Env[Any, Any]:
    """Wrap an environment, with the first wrapper innermost. A MetaEnv keeps its tasks."""
    found = functools.reduce(_in_wrapper, wrappers, env)
    return _InWrappers(found, env) if wrappers and isinstance(env, MetaEnv) else found


class _InWrappers(WithTasks):
    """Wrapped MetaEnv. Changes that wrappers make to the reward are a separate reward term."""

    def step(self, action: Array) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if "reward_terms" in info:
            terms = info["reward_terms"]
            info = {**info, "reward_terms": {**terms, "wrappers": float(reward) - sum(terms.values())}}
        return observation, reward, terminated, truncated, info


def wrapper_class(wrapper: WrapperConfig) -> type[gymnasium.Wrapper[Any, Any, Any, Any]]:
    """Return a wrapper's class; raise EnvError if it is unknown, keeps statistics over episodes or writes videos."""
    try:
        cls = load_class(wrapper.path, gymnasium.Wrapper, wrapper.name)
    except ConfigError as problem:
        if ":" in wrapper.name:
            raise EnvError(f"env.wrappers: {problem}") from problem
        raise EnvError(
            f"env.wrappers: no wrapper {wrapper.name!r}{suggestion(wrapper.name, gymnasium.wrappers.__all__)}\nUse a "
            "class of gymnasium.wrappers for single environments, or module:Class of another gymnasium.Wrapper"
        ) from problem
    for statistics, setting in STATISTICS.items():
        if issubclass(cls, statistics):
            raise EnvError(
                f"env.wrappers: the statistics of {wrapper.name} come from one copy of the environment, so results "
                "would depend on the number of workers and on resumes. Keep statistics in the learner instead: "
                f"remove the wrapper and --set {setting}"
            )
    if issubclass(cls, RecordVideo):
        raise EnvError(
            f"env.wrappers: with {wrapper.name}, every copy of the environment would write videos to a folder named in "
            "the settings, even when someone else replays the run. Wrappers must not write files: "
            "remove it and film stored episodes with `metaloom video RUN@ITERATION`"
        )
    return cls


def _in_wrapper(env: gymnasium.Env[Any, Any], wrapper: WrapperConfig) -> gymnasium.Env[Any, Any]:
    cls = wrapper_class(wrapper)
    about = f"env.wrappers: {wrapper.name} with options {wrapper.options}"
    try:
        inspect.signature(cls).bind(env, **wrapper.options)
    except TypeError as problem:
        _, *allowed = inspect.signature(cls).parameters
        raise EnvError(f"{about}: {problem}; allowed: {', '.join(allowed) or 'none'}") from None
    try:
        found = cls(env, **wrapper.options)
        changed = {
            "observation_components": found.observation_space is not env.observation_space,
            "action_components": found.action_space is not env.action_space,
        }
    except BaseException as problem:
        if is_ctrl_c(problem):
            raise
        found = f"{about} raised {last_line(problem)}"
        if "max_episode_steps" in found and getattr(env.spec, "max_episode_steps", None) is None:
            raise EnvError(
                f"{found}; the environment sets no step limit, and wrappers do not see the run's; put "
                "{name: TimeLimit, options: {max_episode_steps: 100}} before it in env.wrappers or, if it reads "
                "`env.spec`, register the class with max_episode_steps and name the environment module:Id"
            ) from problem
        raise EnvError(
            f"{found}; the environment has observations in {env.observation_space} and actions in {env.action_space}"
        ) from problem
    changed["observation_components"] |= isinstance(found, gymnasium.ObservationWrapper)
    changed["action_components"] |= isinstance(found, gymnasium.ActionWrapper)
    for name, differs in changed.items():
        if differs and not (hasattr(cls, name) or name in vars(found)):
            setattr(found, name, None)  # the declared components may no longer be correct
    return found
