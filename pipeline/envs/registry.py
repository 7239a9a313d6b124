"""Construction of environments by name."""

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator

from metaloom.pipeline.envs import ENVS, PLUGINS
from metaloom.pipeline.envs.answers import is_ctrl_c, last_line, own_traceback
from metaloom.pipeline.envs.config import EnvConfig, registered_id
from metaloom.pipeline.envs.contract import BatchEnv, EnvError, MetaEnv
from metaloom.pipeline.envs.spaces import observation_dtype
from metaloom.pipeline.envs.task_classes import Classes
from metaloom.pipeline.schema import ConfigError, suggestion


def make_env(config: EnvConfig) -> MetaEnv:
    """Return an environment that accepts the policy's actions.

    Raises EnvError if the name, an option or the action space is not supported.
    """
    # Imported here, so that reading ENVS stays cheap.
    from metaloom.pipeline.envs.outer_wrappers import in_wrappers
    from metaloom.pipeline.envs.wrappers import PolicyActions, SingleTask, observe_places

    path = require_env(config.name)
    env = _make_from_gymnasium(path, config) if path in gymnasium.registry else _make_from_class(config)
    env = in_wrappers(env, config.wrappers)
    if not isinstance(env, MetaEnv):
        env = env if config.observed is None else observe_places(env, config.observed)
        return PolicyActions(SingleTask(env, config.facts), config.action_scale)
    if config.observed is not None:
        raise EnvError(
            f"env.observed is {list(config.observed)} but {config.name} is a MetaEnv; the setting is for plain "
            "gymnasium environments only. Remove it, or restrict what the environment itself returns"
        )
    if config.facts:
        raise EnvError(
            f"env.facts has {', '.join(config.facts)} but {config.name} is a MetaEnv; the setting is for plain "
            "gymnasium environments, which report facts in `info`. Declare them as `facts` of the class instead"
        )
    _check_tasks(env)
    return PolicyActions(env, config.action_scale)


def make_batch_env(
    config: EnvConfig, num_rows: int, num_threads: int = 1, watch_row: Callable[[int], None] | None = None
) -> BatchEnv:
    """Return a batch of N environments that accepts the policy's actions.

    If a loop steps the environments, it calls `watch_row` with a row's index before calling the row's environment.
    Raises EnvError as `make_env` does.
    """
    from metaloom.pipeline.envs.loop_batch import LoopBatch

    env = make_env(config)
    if (batch := env.batch(num_rows, num_threads)) is not None:
        return batch
    dtype = observation_dtype(env.observation_space, config)
    return LoopBatch(lambda: make_env(config), num_rows, watch_row, dtype)


def with_all_options(config: EnvConfig) -> EnvConfig:
    """Return a configuration in which the default options of a built-in environment are filled in."""
    if config.name not in ENVS:
        return config
    parameters = inspect.signature(find_env(config.name)).parameters.values()
    # Omit defaults of None, which mean off, so that new options do not change a run's digest.
    options = [parameter for parameter in parameters if parameter.name != "render_mode"]
    defaults = {option.name: option.default for option in options if option.default is not None}
    return config.model_copy(update={"options": {**defaults, **config.options}})


def require_env(name: str) -> str:
    """Return an environment's path, module:Class, or its gymnasium id, or raise EnvError if the name is unknown."""
    try:
        return (None if name in ENVS else registered_id(name)) or PLUGINS.path(name)
    except ConfigError as problem:
        known = [*PLUGINS.names(), *gymnasium.registry]
        if ":" in name:
            raise EnvError(f"env.name: {problem}") from problem
        raise EnvError(
            f"env.name is {name!r}{suggestion(name, known) or ', which is unknown'}\nUse a name that "
            "`metaloom recipes --envs` lists; or a name that gymnasium knows, such as Hopper-v5, or module:Hopper-v5; "
            "or module:Class for a custom environment"
        ) from problem


def find_env(name: str) -> type[gymnasium.Env[Any, Any]]:
    """Return the class of an environment that is not registered with gymnasium, or raise EnvError if there is none."""
    try:
        return PLUGINS.find(name, gymnasium.Env)
    except ConfigError as problem:
        raise EnvError(f"env.name: {problem}") from problem


def _check_tasks(env: MetaEnv) -> None:
    name, fields, classes = type(env.unwrapped).__name__, [field.name for field in env.task_fields], env.task_classes
    for which, tasks in (("task_set", env.task_set), ("test_task_set", env.test_task_set)):
        if tasks is not None and not _is_task_set(tasks, len(fields)):
            raise EnvError(
                f"{name}.{which}: got {tasks!r:.100}; expected a tuple with a tuple of {len(fields)} numbers for "
                "every task, one per task field; from an array: tuple(map(tuple, array.tolist()))"
            )
    if classes is None:
        return
    if not isinstance(classes, Classes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise EnvError(
            f"{name}.task_classes: got {classes!r:.100}; use `nearest` or `bins` of "
            "metaloom.pipeline.envs.task_classes, or None"
        )
    if missing := [field for field in classes.fields if field not in fields]:
        raise EnvError(
            f"{name}.task_classes uses {', '.join(missing)}, but the task fields are {fields}; use some of these, or "
            "set task_classes = None if the classes are inherited"
        )


def _is_task_set(tasks: Sequence[Sequence[float]], width: int) -> bool:
    try:
        hash(tasks)  # require nested tuples, since tasks are looked up in sets
        return np.shape(np.asarray(tasks, np.float64)) == (len(tasks), width)
    except (TypeError, ValueError):
        return False


def _hear_mujoco() -> None:
    """Make MuJoCo print each warning once. Its own handler repeats warnings per model and writes MUJOCO_LOG.TXT."""
    if (mujoco := sys.modules.get("mujoco")) is not None and mujoco.get_mju_user_warning() is None:
        # Warnings of unstable simulations contain the time, so no two texts would be the same.
        mujoco.set_mju_user_warning(lambda warning: _write_once(warning.partition(" Time = ")[0]))


@lru_cache(maxsize=256)
def _write_once(warning: str) -> None:
    with suppress(Exception):  # MuJoCo calls from C, where an exception would end the process
        sys.stderr.write(f"MuJoCo warns: {warning}\n")


def _make_from_class(config: EnvConfig) -> gymnasium.Env[Any, Any]:
    cls = find_env(config.name)
    _hear_mujoco()
    try:
        inspect.signature(cls).bind(**config.options)
    except TypeError as problem:
        allowed = [name for name in inspect.signature(cls).parameters if name != "render_mode"]
        raise EnvError(
            f"env.options of {config.name} are {config.options}: {problem}; allowed: {', '.join(allowed) or 'none'}"
        ) from None
    try:
        return cls(**config.options)
    except EnvError:
        raise
    except BaseException as problem:
        if is_ctrl_c(problem):
            raise
        raise EnvError(
            f"env.name is {config.name!r}: making it with options {config.options} raised {last_line(problem)}\n"
            f"Its own traceback:\n{own_traceback(problem).rstrip()}"
        ) from problem


def _make_from_gymnasium(gymnasium_id: str, config: EnvConfig) -> gymnasium.Env[Any, Any]:
    if "max_episode_steps" in config.options:
        raise EnvError(
            "env.options has max_episode_steps; use the run's own setting instead: --set "
            f"max_episode_steps={config.options['max_episode_steps']}"
        )
    try:
        if isinstance(creator := gymnasium.registry[gymnasium_id].entry_point, str):
            load_env_creator(creator)
        _hear_mujoco()
        # -1 disables TimeLimit, since the run's max_episode_steps ends episodes.
        env = gymnasium.make(gymnasium_id, max_episode_steps=-1, disable_env_checker=True, **config.options)
    except BaseException as problem:
        if is_ctrl_c(problem):
            raise
        raise EnvError(
            f"gymnasium cannot make {config.name!r} with options {config.options}: it raised {last_line(problem)}"
        ) from problem
    if env.unwrapped.spec is not None:
        # Environments that read their own limit, for example for a reward, see the registered one.
        env.unwrapped.spec.max_episode_steps = gymnasium.registry[gymnasium_id].max_episode_steps
    return env
