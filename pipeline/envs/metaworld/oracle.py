"""Rows of one class of tasks: their simulations, and observations and rewards by the package's own code, the oracle."""
# pyright: reportAttributeAccessIssue=false
# MuJoCo's compiled modules have no type stubs.

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import mujoco
import numpy as np
from mujoco.batch import Batch

from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.metaworld.package import official_classes
from metaloom.pipeline.types import Array

STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
"""All of MuJoCo's state that a step depends on."""

_PLACES = int(mujoco.mjtStage.mjSTAGE_POS)
_NO_CONTACTS = int(mujoco.mjtDisableBit.mjDSBL_CONTACT) | int(mujoco.mjtDisableBit.mjDSBL_CONSTRAINT)
_MOCAP_QUAT = (1.0, 0.0, 1.0, 0.0)


@dataclass(frozen=True)
class Start:
    """The beginning of every episode with a goal, since a reset draws nothing else.

    Attributes:
        observation: [39].
        state: [S], STATE.
        body_pos, site_pos: Fields of the model that a goal moves.
        attributes: Attributes of the package's environment.
    """

    observation: Array
    state: Array
    body_pos: Array
    site_pos: Array
    attributes: Mapping[str, Any]


class RowPhysics:
    """MuJoCo's batch of one class, moved by a mocap body as the package does it.

    Args:
        env: The package's environment of the class; other simulations may use it too, but not at the same time.
        starts: Starts of the N rows' episodes.
        num_threads: Threads of the batch.

    Attributes:
        batch: MuJoCo's.
        joints: [N, nq] positions and [N, nv] velocities, live.
    """

    def __init__(self, env: Any, starts: Sequence[Start], num_threads: int) -> None:
        self.batch: Any = Batch(env.model, len(starts), num_threads)
        self._env, self._num_rows = env, len(starts)
        self._body_pos, self._site_pos = (self.batch.expand(name) for name in ("body_pos", "site_pos"))
        self._body_pos[:] = [start.body_pos for start in starts]
        self._site_pos[:] = [start.site_pos for start in starts]
        self.batch.state[:] = [start.state for start in starts]
        self._mocap_pos, mocap_quat, self._ctrl, qpos, qvel = (
            self.batch.bind(name) for name in ("mocap_pos", "mocap_quat", "ctrl", "qpos", "qvel")
        )
        mocap_quat[:] = _MOCAP_QUAT
        self.joints: tuple[Array, Array] = qpos, qvel

    def step(self, actions: Array, rows: Array) -> None:
        """Step n of the rows (sorted, unique) with actions [n, 4]."""
        env, some = self._env, self.some(rows)
        # In the precision of the actions, as the package does it.
        moves = np.minimum(np.maximum(actions[:, :3], -1), 1) * env.action_scale
        moved = self._mocap_pos[some] + moves[:, None]
        self._mocap_pos[some] = np.minimum(np.maximum(moved, env.mocap_low), env.mocap_high)
        self._ctrl[some] = actions[:, 3:] * (1, -1)
        self.batch.step(ids=self._ids(rows), nstep=env.frame_skip)

    def place(self, rows: Array) -> None:
        """Compute the body positions of n rows at the new joint positions; a step leaves them one physics step late."""
        before = self._disabled.copy()
        # Contacts and constraints are not needed, but take most of the time of a stage.
        self._disabled[:] |= _NO_CONTACTS
        self.batch.forward(ids=self._ids(rows), stage=_PLACES)
        self._disabled[:] = before

    @cached_property
    def _disabled(self) -> Array:
        return self.batch.expand("opt.disableflags")

    def put(self, row: int) -> None:
        """Set the package's model and data to the state of a row; nothing is derived from it yet."""
        model = self._env.model
        model.body_pos[:], model.site_pos[:] = self._body_pos[row], self._site_pos[row]
        mujoco.mj_setState(model, self._env.data, self.batch.state[row], STATE)

    def show(self, row: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        """Return the package's model and data in the state of a row, until another row is looked at."""
        self.put(row)
        mujoco.mj_forward(self._env.model, self._env.data)
        return self._env.model, self._env.data

    def some(self, rows: Array) -> Array | slice:
        """Return the rows as an index; all of them as a slice, which makes views instead of copies."""
        return slice(None) if len(rows) == self._num_rows else rows

    def _ids(self, rows: Array) -> Array | None:
        return None if len(rows) == self._num_rows else rows


INFO = ("near_object", "grasp_success", "grasp_reward", "in_place_reward", "obj_to_target", "unscaled_reward")
"""Quantities that every class reports in `info` besides success."""

MAX_STEPS = 500
"""Step limit of an episode; the package refuses to step further."""

_MAX_DRAWS = 100


class RowsStep(NamedTuple):
    """One control step of n rows.

    Attributes:
        observations: [n, 39].
        rewards: [n].
        success: [n] bool.
        info: name -> [n], see INFO.
        truncated: [n] bool, that was the last of MAX_STEPS.
    """

    observations: Array
    rewards: Array
    success: Array
    info: Mapping[str, Array]
    truncated: Array


class OfficialClass:
    """The package's environment of one class, and the starts of its episodes, each simulated once.

    Args:
        name: Name of the class, see names.CLASSES.
        goal_visible: Show the goal in the last three entries of an observation, which are 0 otherwise.
        reward_version: Version of the package's rewards, v1 or v2.
    """

    def __init__(self, name: str, *, goal_visible: bool, reward_version: str) -> None:
        self.name: str = name
        self.reward_version: str = reward_version
        self.env: Any = official_classes()[name](reward_function_version=reward_version)
        self.env._set_task_called = True
        self.env._partially_observable = not goal_visible
        # Cached when the goal was still hidden, and read for the bounds of observations.
        self.env.__dict__.pop("sawyer_observation_space", None)
        self.space: Any = self.env._random_reset_space
        self.model: mujoco.MjModel = self.env.model
        self.data: mujoco.MjData = self.env.data
        self._starts: dict[bytes, Start] = {}

    def goal_of(self, task_goal: Array) -> Array:
        """Return the goal without padding.

        Raises:
            EnvError: the class has no such goal.
        """
        low, high = self.space.low, self.space.high
        goal, rest = task_goal[: len(low)], task_goal[len(low) :]
        if rest.any() or (goal < low).any() or (goal > high).any():
            raise EnvError(
                f"Meta-World: found the goal {task_goal.tolist()} for {self.name}; required {len(low)} numbers from "
                f"{low.tolist()} to {high.tolist()}, and 0 beyond them"
            )
        return goal.copy()

    def start(self, goal: Array) -> Start:
        """Reset to a goal, once for each goal.

        Raises:
            EnvError: the class refuses the goal.
        """
        key = goal.tobytes()
        if key not in self._starts:
            self._starts[key] = self._reset(goal)
        return self._starts[key]

    def _reset(self, goal: Array) -> Start:
        env, draws = self.env, 0

        def given() -> Array:
            nonlocal draws
            draws += 1
            if draws > _MAX_DRAWS:  # the class rejects one goal after the other
                raise EnvError(
                    f"Meta-World: {self.name} does not accept the goal {goal.tolist()}, most likely because object and "
                    "goal are too close; required one as the benchmark draws them"
                )
            return goal

        env._get_state_rand_vec = given
        observation, _ = env.reset()
        state = np.empty(mujoco.mj_stateSize(self.model, STATE))
        mujoco.mj_getState(self.model, self.data, state, STATE)
        attributes = {name: value for name, value in vars(env).items() if name != "_get_state_rand_vec"}
        return Start(observation, state, self.model.body_pos.copy(), self.model.site_pos.copy(), attributes)


class ClassRows:
    """N rows of one class, at the starts of the episodes with their goals [N, R].

    Attributes:
        physics: Physics that moves the rows.
        observations: [N, 39], the first ones.
    """

    def __init__(self, official: OfficialClass, goals: Array, num_threads: int) -> None:
        self._official = official
        self._starts = [official.start(goal) for goal in goals]
        self.physics: RowPhysics = RowPhysics(official.env, self._starts, num_threads)
        self.observations: Array = np.stack([start.observation for start in self._starts])

    @abstractmethod
    def step(self, actions: Array, rows: Array) -> RowsStep:
        """Step n of the rows (sorted, unique) with actions [n, 4] float32."""


class OracleRows(ClassRows):
    """Rows that MuJoCo's batch steps, and the package evaluates one by one.

    The rows share one MjModel and one MjData. Whatever the package keeps of an episode belongs to the row, so that
    neither the order of the rows nor earlier episodes make a difference.
    """

    def __init__(self, official: OfficialClass, goals: Array, num_threads: int) -> None:
        super().__init__(official, goals, num_threads)
        self._rows = [self._row(row, start) for row, start in enumerate(self._starts)]

    def step(self, actions: Array, rows: Array) -> RowsStep:
        self.physics.step(actions, rows)
        answers = [self._rows[row].step(action) for row, action in zip(rows.tolist(), actions, strict=True)]
        observations, rewards, _, truncated, infos = zip(*answers, strict=True)
        return RowsStep(
            np.stack(observations),
            np.array(rewards, np.float64),
            np.array([info["success"] == 1 for info in infos]),
            {name: np.array([info[name] for info in infos], np.float64) for name in INFO},
            np.array(truncated),
        )

    def _row(self, row: int, start: Start) -> Any:
        """Make another object of the package's class, whose steps read the simulation of the batch."""
        env = object.__new__(type(self._official.env))
        env.__dict__.update(start.attributes)
        env.do_simulation = lambda ctrl, n_frames: self.physics.put(row)
        return env
