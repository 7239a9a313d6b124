"""Rows of several classes of tasks: one batch of simulations per class inside one environment batch."""

from collections.abc import Callable, Mapping

import numpy as np

from metaloom.pipeline.envs.contract import BatchStep, Fact
from metaloom.pipeline.envs.metaworld.computation import ClassRows, Computation, class_rows
from metaloom.pipeline.envs.metaworld.oracle import INFO, OfficialClass
from metaloom.pipeline.envs.mujoco_robot import stop_profiling_timer
from metaloom.pipeline.types import Array

OBSERVATION_SIZE, ACTION_SIZE = 39, 4

FACTS = (
    Fact("success", "flag"),
    *(Fact(name, unit="m" if name == "obj_to_target" else "1") for name in INFO),
    Fact("steps_until_success", per="episode"),
)
"""What `info` tells, and the steps up to the first success, or all steps while there is none."""

_MAX_JOINTS = 35
"""Positions and velocities of the class that has the most, stick-push; the state of the others ends in zeros."""


class MetaWorldBatch:
    """N rows of a benchmark; a reset may give each another class.

    Args:
        official: makes a class by its number; called once for each.
        one_hot: class number -> its place among those that an observation tells apart at its end; empty for none.
        num_rows: N.
        num_threads: of the simulators.
        computation: who computes the rows.
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
        self.observation_size = OBSERVATION_SIZE + len(one_hot)
        self.action_size = ACTION_SIZE

    def official(self, number: int) -> OfficialClass:
        """The class of this number."""
        if number not in self._officials:
            self._officials[number] = self._make(number)
        return self._officials[number]

    def reset(self, tasks: Array, seeds: Array) -> Array:
        # A goal decides all of a start: seeds play no part.
        stop_profiling_timer()
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
        # As the package's action space has them: its rewards compute with the numbers of an action.
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
        """MuJoCo's model and data in the state of a row."""
        (group,) = (group for members, group in self._groups if row in members)
        return group.physics.show(int(self._place[row]))

    def close(self) -> None:
        self._groups.clear()
        self._officials.clear()
