"""Batches of several classes of tasks, with one batch of simulations per class."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from metaloom.pipeline.envs.contract import BatchStep, EnvError, Fact, RowBatch
from metaloom.pipeline.envs.metaworld.oracle import INFO, ClassRows, OfficialClass, OracleRows
from metaloom.pipeline.envs.metaworld.rows.table import ROW_TASKS
from metaloom.pipeline.envs.metaworld.rows.vectorized import VectorizedRows
from metaloom.pipeline.envs.mujoco_robot import stop_profiling_timer
from metaloom.pipeline.types import Array

Computation = Literal["auto", "vectorized", "oracle"]
"""Implementation: `vectorized` rules for rows, `oracle` for the package's code, `auto` for rules where available."""

_VERSION_OF_RULES = "v2"


def check_computation(where: str, computation: object, reward_version: str, names: Sequence[str]) -> None:
    """Reject a computation that is not available for these classes.

    Raises:
        EnvError: it is not one of Computation, or rules are missing.
    """
    if computation not in get_args(Computation):
        raise EnvError(f"{where}: computation is {computation!r}; required one of {', '.join(get_args(Computation))}")
    if computation != "vectorized":
        return
    if reward_version != _VERSION_OF_RULES:
        raise EnvError(
            f"{where}: computation is 'vectorized' and reward_version {reward_version!r}; required version "
            f"{_VERSION_OF_RULES!r}, which the rules for rows implement, or computation 'auto' or 'oracle'"
        )
    if missing := [name for name in names if name not in ROW_TASKS]:
        raise EnvError(
            f"{where}: computation is 'vectorized', for which {', '.join(missing)} "
            f"{'has' if len(missing) == 1 else 'have'} no rules; required 'auto' or 'oracle', or classes among "
            f"{', '.join(ROW_TASKS)}"
        )


def computed_by(name: str, computation: Computation, reward_version: str) -> Literal["vectorized", "oracle"]:
    """Return which implementation computes a class."""
    by_rules = computation != "oracle" and reward_version == _VERSION_OF_RULES and name in ROW_TASKS
    return "vectorized" if by_rules else "oracle"


def class_rows(official: OfficialClass, goals: Array, num_threads: int, computation: Computation) -> ClassRows:
    """Return the rows of a class with goals [N, R], at the starts of their episodes."""
    if computed_by(official.name, computation, official.reward_version) == "vectorized":
        return VectorizedRows(official, goals, num_threads)
    return OracleRows(official, goals, num_threads)


OBSERVATION_SIZE, ACTION_SIZE = 39, 4

FACTS = (
    Fact("success", "flag"),
    *(Fact(name, unit="m" if name == "obj_to_target" else "1") for name in INFO),
    Fact("steps_until_success", per="episode"),
)
"""Facts from `info`, and the number of steps up to the first success or, without success, of all steps."""

_MAX_JOINTS = 35
"""Positions and velocities of stick-push, which has the most; other classes' states are padded with zeros."""


class MetaWorldBatch(RowBatch):
    """N rows of a benchmark; a reset may assign each a different class.

    Args:
        official: Function that makes a class by number; called once per class.
        one_hot: Index in the one-hot vector at the end of an observation by class number; empty for no such vector.
        num_rows: N.
        num_threads: Threads of the simulators.
        computation: Implementation that computes the rows.
    """

    def __init__(
        self,
        official: Callable[[int], OfficialClass],
        one_hot: Mapping[int, int],
        num_rows: int,
        num_threads: int,
        computation: Computation,
    ) -> None:
        self._make, self._one_hot, self._num_threads = official, one_hot, num_threads
        self._computation: Computation = computation
        self._officials: dict[int, OfficialClass] = {}
        self._groups: list[tuple[Array, ClassRows]] = []
        self._ids = np.zeros((num_rows, len(one_hot)))
        self._place = np.zeros(num_rows, np.int64)
        self._until_success = np.zeros(num_rows)
        self._succeeded = np.zeros(num_rows, np.bool_)
        self.num_rows = num_rows
        self.observation_size: int = OBSERVATION_SIZE + len(one_hot)
        self.action_size = ACTION_SIZE

    def official(self, number: int) -> OfficialClass:
        """Return the class of this number."""
        if number not in self._officials:
            self._officials[number] = self._make(number)
        return self._officials[number]

    def begin(self, rngs: Sequence[np.random.Generator]) -> Array:
        # The goal determines the start; random values have no effect.
        stop_profiling_timer()
        tasks = self.tasks
        numbers = tasks[:, 0].astype(np.int64)
        self._groups.clear()
        self._until_success[:], self._succeeded[:] = 0, False
        observations = np.empty((self.num_rows, OBSERVATION_SIZE))
        for number in np.unique(numbers).tolist():
            rows, official = np.flatnonzero(numbers == number), self.official(number)
            goals = np.stack([official.goal_of(goal) for goal in tasks[rows, 1:]])
            group = class_rows(official, goals, self._num_threads, self._computation)
            self._groups.append((rows, group))
            self._place[rows] = np.arange(len(rows))
            observations[rows] = group.observations
        if self._one_hot:
            self._ids[:] = [np.eye(len(self._one_hot))[self._one_hot[number]] for number in numbers.tolist()]
        return self._observed(observations, slice(None))

    def step(self, actions: Array, rows: Array) -> BatchStep:
        # In the dtype of the package's action space, since its rewards use the action's values.
        actions = actions.astype(np.float32)
        observations = np.empty((len(rows), OBSERVATION_SIZE))
        numbers = {name: np.empty(len(rows)) for name in ("reward", *INFO)}
        success, truncated = np.empty(len(rows), np.bool_), np.empty(len(rows), np.bool_)
        for members, group in self._groups:
            everyone = len(rows) == self.num_rows
            at = members if everyone else np.flatnonzero(np.isin(rows, members, assume_unique=True))
            if not len(at):
                continue
            step = group.step(actions[at], self._place[rows[at]])
            observations[at], success[at], truncated[at] = step.observations, step.success, step.truncated
            for name, values in {"reward": step.rewards, **step.info}.items():
                numbers[name][at] = values
        self._until_success[rows] += ~self._succeeded[rows]
        self._succeeded[rows] |= success
        return BatchStep(
            self._observed(observations, rows),
            {"reward": numbers.pop("reward")},
            np.zeros(len(rows), np.bool_),
            truncated,
            {"success": success, **numbers, "steps_until_success": self._until_success[rows]},
        )

    def _observed(self, observations: Array, rows: Array | slice) -> Array:
        return np.concatenate([observations, self._ids[rows]], axis=1) if self._one_hot else observations

    @property
    def state(self) -> Array:
        states = np.zeros((self.num_rows, _MAX_JOINTS))
        for rows, group in self._groups:
            joints = np.concatenate(group.physics.joints, axis=1)
            states[rows, : joints.shape[1]] = joints
        return states

    def show(self, row: int) -> tuple[object, object]:
        """Return MuJoCo's model and data in the state of a row."""
        (group,) = (group for members, group in self._groups if row in members)
        return group.physics.show(int(self._place[row]))

    def close(self) -> None:
        self._groups.clear()
        self._officials.clear()
