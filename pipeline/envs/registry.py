"""Environments by name: robots with a distribution of tasks, and any gymnasium env as one with a single task.

To add one, write its file in this folder and its line in ENVS.
"""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import gymnasium

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import BatchEnv, BatchStep, EnvError, MetaEnv, TaskField
from metaloom.pipeline.envs.finite_checks import RowFault, last_line, own_traceback

__all__ = [
    "ENVS",
    "BatchEnv",
    "BatchStep",
    "EnvConfig",
    "EnvError",
    "MetaEnv",
    "RowFault",
    "TaskField",
    "make_batch_env",
    "make_env",
    "with_all_options",
]

ENVS: dict[str, str] = {
    "ant-dir": "metaloom.pipeline.envs.ant:AntDir",
    "ant-dir-2d": "metaloom.pipeline.envs.ant:AntDir2D",
    "ant-goal": "metaloom.pipeline.envs.ant:AntGoal",
    "half-cheetah-dir": "metaloom.pipeline.envs.half_cheetah:HalfCheetahDir",
    "half-cheetah-vel": "metaloom.pipeline.envs.half_cheetah:HalfCheetahVel",
    "hopper-rand-params": "metaloom.pipeline.envs.hopper:HopperRandParams",
    "humanoid-dir": "metaloom.pipeline.envs.humanoid:HumanoidDir",
    "humanoid-dir-2d": "metaloom.pipeline.envs.humanoid:HumanoidDir2D",
    "navigation-2d": "metaloom.pipeline.envs.point:Navigation2D",
    "pearl-ant-dir": "metaloom.pipeline.envs.ant:PearlAntDir",
    "pearl-ant-goal": "metaloom.pipeline.envs.ant:PearlAntGoal",
    "pearl-cheetah-dir": "metaloom.pipeline.envs.half_cheetah:PearlCheetahDir",
    "pearl-cheetah-vel": "metaloom.pipeline.envs.half_cheetah:PearlCheetahVel",
    "pearl-hopper-rand-params": "metaloom.pipeline.envs.hopper:PearlHopperRandParams",
    "pearl-humanoid-dir": "metaloom.pipeline.envs.humanoid:PearlHumanoidDir",
    "pearl-point-robot": "metaloom.pipeline.envs.point_pearl:PearlPointRobot",
    "pearl-sparse-point-robot": "metaloom.pipeline.envs.point_pearl:PearlSparsePointRobot",
    "pearl-walker2d-rand-params": "metaloom.pipeline.envs.walker2d:PearlWalker2dRandParams",
    "point-2d": "metaloom.pipeline.envs.point:Point2D",
    "point-2d-goal": "metaloom.pipeline.envs.point:Point2DGoal",
    "point-corner": "metaloom.pipeline.envs.point_corner:PointCorner",
    "point-momentum": "metaloom.pipeline.envs.point_corner:PointMomentum",
    "point-walls": "metaloom.pipeline.envs.point_corner:PointWalls",
    "swimmer-vel": "metaloom.pipeline.envs.swimmer:SwimmerVel",
    "walker2d-dir": "metaloom.pipeline.envs.walker2d:Walker2dDir",
    "walker2d-rand-params": "metaloom.pipeline.envs.walker2d:Walker2dRandParams",
    "walker2d-vel": "metaloom.pipeline.envs.walker2d:Walker2dVel",
}
"""Name -> module:Class. The module is imported when an environment is made."""


def make_env(config: EnvConfig) -> MetaEnv:
    """One environment that takes a policy's actions.

    Raises:
        EnvError: the name, an option or the action space cannot be used; the message says what can.
    """
    # Imported here so that reading ENVS stays cheap.
    from metaloom.pipeline.envs.wrappers import PolicyActions

    return PolicyActions(_make_unscaled(config), config.action_scale)


def make_batch_env(
    config: EnvConfig, num_rows: int, num_threads: int = 1, watch_row: Callable[[int], None] | None = None
) -> BatchEnv:
    """N environments that take a policy's actions, stepped together, on as many threads if they can use them.

    `watch_row` is told each row before its environment is called, where a loop calls one after the other.

    Raises:
        EnvError: as `make_env`.
    """
    from metaloom.pipeline.envs.loop_batch import LoopBatch, ignore_row

    batch = make_env(config).batch(num_rows, num_threads)
    return LoopBatch(lambda: make_env(config), num_rows, watch_row or ignore_row) if batch is None else batch


def with_all_options(config: EnvConfig) -> EnvConfig:
    """The same environment with the options that it takes by default written out, where it is a built-in one."""
    if config.name not in ENVS:
        return config
    parameters = inspect.signature(import_object(ENVS[config.name])).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters if parameter.name != "render_mode"}
    return config.model_copy(update={"options": {**defaults, **config.options}})


def _make_unscaled(config: EnvConfig) -> MetaEnv:
    from metaloom.pipeline.envs.wrappers import SingleTask

    path = ENVS.get(config.name, config.name)
    if ":" in path:
        env = _make_from_path(path, config)
    elif path in gymnasium.registry:
        env = _make_from_gymnasium(config)
    else:
        raise EnvError(_unknown(config.name))
    return env if isinstance(env, MetaEnv) else SingleTask(env)


def _make_from_path(path: str, config: EnvConfig) -> gymnasium.Env[Any, Any]:
    factory = import_object(path)
    try:
        inspect.signature(factory).bind(**config.options)
    except TypeError as problem:
        allowed = [name for name in inspect.signature(factory).parameters if name != "render_mode"]
        raise EnvError(
            f"env.options of {config.name} are {config.options}: {problem}; allowed: {', '.join(allowed) or 'none'}"
        ) from None
    env = _call(factory, config)
    if not isinstance(env, gymnasium.Env):
        raise EnvError(f"env.name {config.name!r} makes a {type(env).__name__}; required a gymnasium.Env or MetaEnv")
    return env


def _call(factory: Callable[..., Any], config: EnvConfig) -> Any:
    try:
        return factory(**config.options)
    except EnvError:
        raise
    except (Exception, SystemExit) as problem:
        raise EnvError(
            f"env.name is {config.name!r}: making it with options {config.options} raised {last_line(problem)}\n"
            f"Its own traceback:\n{own_traceback(problem).rstrip()}"
        ) from problem


def _make_from_gymnasium(config: EnvConfig) -> gymnasium.Env[Any, Any]:
    try:
        # -1: no TimeLimit, since max_episode_steps of the run ends the episodes.
        return gymnasium.make(config.name, max_episode_steps=-1, disable_env_checker=True, **config.options)
    except Exception as problem:
        raise EnvError(f"gymnasium cannot make {config.name!r} with options {config.options}: {problem}") from problem


def import_object(path: str) -> Callable[..., Any]:
    """What module:Class names.

    Raises:
        EnvError: there is no such thing.
    """
    module_name, _, class_name = path.partition(":")
    # A user's own module lies in the folder where the command runs, which an installed command does not search.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise EnvError(
            f"env.name is {path!r}: {problem}; required module:Class, with the module in {os.getcwd()} or installed"
        ) from problem


def _unknown(name: str) -> str:
    matches = difflib.get_close_matches(name, [*ENVS, *gymnasium.registry], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(matches)}? " if matches else ""
    return (
        f"env.name is {name!r}; {hint}Required: one of {', '.join(ENVS)}; a name that gymnasium knows, such as "
        "Hopper-v5; or module:Class for an environment of your own"
    )
