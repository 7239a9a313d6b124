"""The `metaworld` package, imported on first use, and the goals of its benchmarks."""
# pyright: reportAttributeAccessIssue=false
# MuJoCo's compiled modules have no type stubs.

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mujoco
import numpy as np

from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.metaworld.names import CLASSES
from metaloom.pipeline.types import Array

VERSION = "3.1.1"  # required version of the package, since rewards differ between versions


@cache
def official_classes() -> Mapping[str, type[Any]]:
    """Return the environment classes, keyed by name without -v3; raise EnvError unless VERSION is installed."""
    try:
        found = version("metaworld")
        importlib.import_module("scipy")
    except (PackageNotFoundError, ImportError):
        raise EnvError(_install("is not installed, or scipy is not")) from None
    if found != VERSION:
        raise EnvError(_install(f"is version {found}"))
    base = importlib.import_module("metaworld.sawyer_xyz_env").SawyerMocapBase
    base.reset_mocap_welds = _reset_mocap_welds
    classes = importlib.import_module("metaworld.env_dict").ALL_V3_ENVIRONMENTS
    return {name.removesuffix("-v3"): cls for name, cls in classes.items()}


def _install(found: str) -> str:
    # Install it without its dependencies, because it requires MuJoCo 3.3.0, which has no batches.
    return (
        f"env.name: the package metaworld {found}; install version {VERSION}: `make metaworld` in a checkout, or "
        f"`pip install --no-deps metaworld=={VERSION} && pip install scipy`"
    )


def _reset_mocap_welds(env: Any) -> None:
    """Replacement for SawyerMocapBase.reset_mocap_welds, which writes 11 values into each row of `eq_data`.

    In newer MuJoCo versions, rows have 12 values (mjNEQDATA); welds do not use the last one.
    """
    model = env.model
    if model.nmocap:
        relative_pose = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 5.0]
        row = np.zeros(model.eq_data.shape[1])
        row[: len(relative_pose)] = relative_pose
        model.eq_data[model.eq_type == mujoco.mjtEq.mjEQ_WELD] = row


GOALS_PER_CLASS = 50
GOAL_SIZE = 6  # number of goal values in a task. Classes with three values set the others to 0.

Tasks = tuple[tuple[float, ...], ...]


@cache
def benchmark_tasks(names: Sequence[str], seed: int) -> Tasks:
    """Return all GOALS_PER_CLASS tasks of each class in a benchmark, as class number followed by GOAL_SIZE goal values.

    The tasks equal those from the package's `_make_tasks(classes, ..., seed)`, which draws from NumPy's global
    generator while simulating resets. Here, the generator is separate and nothing is simulated.
    """
    generator = np.random.RandomState(seed)
    return tuple(task for name in names for task in _class_tasks(name, generator))


def _class_tasks(name: str, generator: Any) -> Tasks:
    env = official_classes()[name]()
    env._set_task_called = True
    env._get_state_rand_vec = lambda: _draw(env, generator)
    env.do_simulation = lambda ctrl, n_frames: mujoco.mj_forward(env.model, env.data)
    reset_hand = env._reset_hand
    env._reset_hand = lambda: reset_hand(steps=1)
    tasks: list[tuple[float, ...]] = []
    for _ in range(GOALS_PER_CLASS):
        env.reset()
        goal = np.pad(env._last_rand_vec, (0, GOAL_SIZE - len(env._last_rand_vec)))
        tasks.append((float(CLASSES.index(name)), *goal.tolist()))
    env.close()
    return tuple(tasks)


def _draw(env: Any, generator: Any) -> Array:
    """Draw a goal as SawyerXYZEnv._get_state_rand_vec does, but from a separate generator."""
    space = env._random_reset_space
    env._last_rand_vec = generator.uniform(space.low, space.high, size=space.low.size)
    return env._last_rand_vec
