"""Batches that mix several task classes, with one batch of simulations per class."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from metaloom.pipeline.envs.contract import BatchStep, EnvError, Fact, RowBatch
from metaloom.pipeline.envs.metaworld.oracle import INFO, MAX_STEPS, ClassRows, OfficialClass, OracleRows, RowsStep
from metaloom.pipeline.envs.metaworld.rows.scene import FRAME_SIZE, Moment, Scene, clip_hand, norm
from metaloom.pipeline.envs.metaworld.rows.table import ROW_TASKS
from metaloom.pipeline.envs.mujoco_robot import stop_profiling_timer
from metaloom.pipeline.types import Array


class VectorizedRows(ClassRows):
    """Rows stepped by MuJoCo's batch and evaluated together by the class's vectorized rules.

    Results agree with OracleRows up to rounding. A row's results are bitwise independent of the other rows. Rewards are
    computed in float64, whereas the package computes parts of them in float32, the dtype of actions.
    """

    def __init__(self, official: OfficialClass, goals: Array, num_threads: int) -> None:
        super().__init__(official, goals, num_threads)
        self._task = ROW_TASKS[official.name]
        self._scene = Scene(self._task, official.model, self.physics.batch)
        if self._task.touched:
            geoms = [official.model.geom(name) for name in ("objGeom", "leftpad_geom", "rightpad_geom")]
            places = self.physics.batch.bind("geom_xpos")
            self._object, *self._pads = (places[:, geom.id] for geom in geoms)
            reaches = [float(geom.rbound[0] + geom.margin[0]) for geom in geoms]
            self._reaches = [reaches[0] + reach for reach in reaches[1:]]
        self._start = {
            name: np.array([start.attributes[attribute] for start in self._starts], np.float64)
            for name, attribute in self._task.start.items()
        }
        self._steps = np.zeros(len(goals), np.int64)
        # The first observation is not clipped, but its copy in the second observation is.
        self._frames = self.observations[:, :FRAME_SIZE].copy()
        clip_hand(self._frames)
        space, shown = official.env.sawyer_observation_space, slice(2 * FRAME_SIZE, None)
        self._goals = np.clip(self.observations[:, shown], space.low[shown], space.high[shown])

    def step(self, actions: Array, rows: Array) -> RowsStep:
        self.physics.step(actions, rows)
        self.physics.place(rows)
        some = self.physics.some(rows)
        scene = self._scene.of(some)
        # An observation consists of the current frame, the previous frame, and the goal.
        frames = np.zeros((len(scene["hand"]), FRAME_SIZE))
        self._scene.write_frames(scene, frames)
        observations = np.concatenate([frames, self._frames[some], self._goals[some]], axis=1)
        self._frames[some] = frames
        moment = Moment(
            actions.astype(np.float64),
            hand=observations[:, :3],
            opened=observations[:, 3],
            object=observations[:, 4:7],
            fingertips=(scene["right_finger"] + scene["left_finger"]) / 2,
            scene=scene,
            start={name: values[some] for name, values in self._start.items()},
        )
        found = self._task.evaluate(moment)
        self._steps[some] += 1
        grasped = self._touching(found.grasp_success, rows) if self._task.touched else found.grasp_success
        parts = (found.near_object, grasped, found.grasp_reward, found.in_place_reward, found.obj_to_target)
        info = {
            name: np.full(len(rows), values, np.float64)
            for name, values in zip(INFO, (*parts, found.rewards), strict=True)
        }
        return RowsStep(observations, found.rewards, found.success, info, self._steps[some] >= MAX_STEPS)

    def _touching(self, asked: Array | float, rows: Array) -> Array:
        """Return a mask [n] that is True where `asked` is True and both pads press on the object.

        Calls the package's row-by-row contact check only where both pads' bounding spheres meet the object's.
        """
        touching = np.array(asked, np.bool_)
        candidates = np.flatnonzero(touching)
        for pad, reach in zip(self._pads, self._reaches, strict=True):
            near = norm(pad[rows[candidates]] - self._object[rows[candidates]]) <= reach
            candidates = candidates[near]
        touching[:] = False
        for place in candidates.tolist():
            self.physics.show(int(rows[place]))
            touching[place] = self._official.env.touching_main_object
        return touching


Computation = Literal["auto", "vectorized", "oracle"]
"""Implementation: `vectorized` rules, `oracle` for the package's code, or `auto` for rules where they are available."""

_VERSION_OF_RULES = "v2"


def check_computation(where: str, computation: object, reward_version: str, names: Sequence[str]) -> None:
    """Raise EnvError if a computation is unknown, or is `vectorized` although a class has no vectorized rules."""
    if computation not in get_args(Computation):
        raise EnvError(f"{where}: computation is {computation!r}; expected one of {', '.join(get_args(Computation))}")
    if computation != "vectorized":
        return
    if reward_version != _VERSION_OF_RULES:
        raise EnvError(
            f"{where}: computation is 'vectorized' but reward_version is {reward_version!r}; use version "
            f"{_VERSION_OF_RULES!r}, which the rules for rows implement, or computation 'auto' or 'oracle'"
        )
    if missing := [name for name in names if name not in ROW_TASKS]:
        raise EnvError(
            f"{where}: computation is 'vectorized', but {', '.join(missing)} "
            f"{'has' if len(missing) == 1 else 'have'} no rules for it; use 'auto' or 'oracle', or classes among "
            f"{', '.join(ROW_TASKS)}"
        )


def computed_by(name: str, computation: Computation, reward_version: str) -> Literal["vectorized", "oracle"]:
    """Return which implementation computes the observations and rewards of a task class."""
    by_rules = computation != "oracle" and reward_version == _VERSION_OF_RULES and name in ROW_TASKS
    return "vectorized" if by_rules else "oracle"


OBSERVATION_SIZE, ACTION_SIZE = 39, 4

FACTS = (
    Fact("success", "flag"),
    *(Fact(name, unit="m" if name == "obj_to_target" else "1") for name in INFO),
    Fact("steps_until_success", per="episode"),
)
"""Facts from `info`, and the number of steps until the first success (all steps if there is none)."""

_MAX_JOINTS = 35
"""Number of positions and velocities in stick-push, the largest; other classes' states are padded with zeros."""


class MetaWorldBatch(RowBatch):
    """Batch of N rows of a benchmark. A reset may assign a different class to each row."""

    def __init__(
        self,
        official: Callable[[int], OfficialClass],  # makes the class with a given number; called once per class
        one_hot: Mapping[int, int],  # index in observations' one-hot vector, keyed by class number; empty for none
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
        """Return the class with this number, which is made on first use."""
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
            computed = computed_by(official.name, self._computation, official.reward_version)
            group = (VectorizedRows if computed == "vectorized" else OracleRows)(official, goals, self._num_threads)
            self._groups.append((rows, group))
            self._place[rows] = np.arange(len(rows))
            observations[rows] = group.observations
        if self._one_hot:
            self._ids[:] = [np.eye(len(self._one_hot))[self._one_hot[number]] for number in numbers.tolist()]
        return self._observed(observations, slice(None))

    def step(self, actions: Array, rows: Array) -> BatchStep:
        # Convert to the dtype of the package's action space, since its rewards depend on the actions.
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
        terms, none = {"reward": numbers.pop("reward")}, np.zeros(len(rows), np.bool_)
        facts = {"success": success, **numbers, "steps_until_success": self._until_success[rows]}
        return BatchStep(self._observed(observations, rows), terms, none, truncated, facts)

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
