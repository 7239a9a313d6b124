"""Rows of one task class, with observations and rewards computed by the package's own code, the oracle."""
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

STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)  # the components of MuJoCo's state on which a step depends

_PLACES = int(mujoco.mjtStage.mjSTAGE_POS)
_NO_CONTACTS = int(mujoco.mjtDisableBit.mjDSBL_CONTACT) | int(mujoco.mjtDisableBit.mjDSBL_CONSTRAINT)
_MOCAP_QUAT = (1.0, 0.0, 1.0, 0.0)


@dataclass(frozen=True)
class Start:
    """Initial state of all episodes with a given goal; resets draw no other random values."""

    observation: Array  # first observation, [39]
    state: Array  # MuJoCo's state, [S], see STATE
    body_pos: Array  # model fields that depend on the goal
    site_pos: Array
    attributes: Mapping[str, Any]  # attributes of the package's environment object


class RowPhysics:
    """MuJoCo batch of N rows of one class, controlled through a mocap body as in the package.

    `env`, the package's environment, may be shared with other simulations, but not concurrently. `joints` are live
    views of the joint positions [N, nq] and velocities [N, nv].
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
        # Compute in the precision of the actions, as the package does.
        moves = np.minimum(np.maximum(actions[:, :3], -1), 1) * env.action_scale
        moved = self._mocap_pos[some] + moves[:, None]
        self._mocap_pos[some] = np.minimum(np.maximum(moved, env.mocap_low), env.mocap_high)
        self._ctrl[some] = actions[:, 3:] * (1, -1)
        self.batch.step(ids=self._ids(rows), nstep=env.frame_skip)

    def place(self, rows: Array) -> None:
        """Update the body positions in n rows; after a step, they lag the joints by one physics step."""
        before = self._disabled.copy()
        # Disable contacts and constraints, which are not needed and would take most of the time.
        self._disabled[:] |= _NO_CONTACTS
        self.batch.forward(ids=self._ids(rows), stage=_PLACES)
        self._disabled[:] = before

    @cached_property
    def _disabled(self) -> Array:
        return self.batch.expand("opt.disableflags")

    def put(self, row: int) -> None:
        """Set the package's model and data to a row's state, without computing derived quantities."""
        model = self._env.model
        model.body_pos[:], model.site_pos[:] = self._body_pos[row], self._site_pos[row]
        mujoco.mj_setState(model, self._env.data, self.batch.state[row], STATE)

    def show(self, row: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        """Return the package's model and data in a row's state; the next call overwrites them."""
        self.put(row)
        mujoco.mj_forward(self._env.model, self._env.data)
        return self._env.model, self._env.data

    def some(self, rows: Array) -> Array | slice:
        """Return an index for rows [n]. For all rows it is a slice, which gives views instead of copies."""
        return slice(None) if len(rows) == self._num_rows else rows

    def _ids(self, rows: Array) -> Array | None:
        return None if len(rows) == self._num_rows else rows


INFO = ("near_object", "grasp_success", "grasp_reward", "in_place_reward", "obj_to_target", "unscaled_reward")
"""Quantities that each class reports in `info` in addition to success."""

MAX_STEPS = 500  # maximum number of steps per episode; the package refuses to step further

_MAX_DRAWS = 100


class RowsStep(NamedTuple):
    """Result of one control step for n rows."""

    observations: Array  # observations after the step, [n, 39]
    rewards: Array  # [n]
    success: Array  # True where the task is solved, [n] bool
    info: Mapping[str, Array]  # values of the quantities in INFO, [n] each
    truncated: Array  # True after MAX_STEPS steps, [n] bool


class OfficialClass:
    """The package's environment for one class, with a cache of initial states.

    `goal_visible` shows the goal in the last three observation entries, which are otherwise 0.
    """

    def __init__(self, name: str, *, goal_visible: bool, reward_version: str) -> None:
        self.name: str = name
        self.reward_version: str = reward_version
        self.env: Any = official_classes()[name](reward_function_version=reward_version)
        self.env._set_task_called = True
        self.env._partially_observable = not goal_visible
        # The space, which bounds observations, was cached while the goal was still hidden.
        self.env.__dict__.pop("sawyer_observation_space", None)
        self.space: Any = self.env._random_reset_space
        self.model: mujoco.MjModel = self.env.model
        self.data: mujoco.MjData = self.env.data
        self._starts: dict[bytes, Start] = {}

    def goal_of(self, task_goal: Array) -> Array:
        """Return a task's goal without padding, or raise EnvError if it is invalid for this class."""
        low, high = self.space.low, self.space.high
        goal, rest = task_goal[: len(low)], task_goal[len(low) :]
        if rest.any() or (goal < low).any() or (goal > high).any():
            raise EnvError(
                f"Meta-World: got the goal {task_goal.tolist()} for {self.name}; expected {len(low)} numbers from "
                f"{low.tolist()} to {high.tolist()}, and 0 beyond them"
            )
        return goal.copy()

    def start(self, goal: Array) -> Start:
        """Return the initial state for a goal, cached per goal, or raise EnvError if the class rejects the goal."""
        key = goal.tobytes()
        if key not in self._starts:
            self._starts[key] = self._reset(goal)
        return self._starts[key]

    def _reset(self, goal: Array) -> Start:
        env, draws = self.env, 0

        def given() -> Array:
            nonlocal draws
            draws += 1
            if draws > _MAX_DRAWS:  # the class rejects this goal
                raise EnvError(
                    f"Meta-World: {self.name} does not accept the goal {goal.tolist()}, most likely because object and "
                    "goal are too close; use a goal that the benchmark can draw"
                )
            return goal

        env._get_state_rand_vec = given
        observation, _ = env.reset()
        state = np.empty(mujoco.mj_stateSize(self.model, STATE))
        mujoco.mj_getState(self.model, self.data, state, STATE)
        attributes = {name: value for name, value in vars(env).items() if name != "_get_state_rand_vec"}
        return Start(observation, state, self.model.body_pos.copy(), self.model.site_pos.copy(), attributes)


class ClassRows:
    """Base class for N rows of one class with goals [N, R]; `observations` [N, 39] are the rows' first observations."""

    def __init__(self, official: OfficialClass, goals: Array, num_threads: int) -> None:
        self._official = official
        self._starts = [official.start(goal) for goal in goals]
        self.physics: RowPhysics = RowPhysics(official.env, self._starts, num_threads)
        self.observations: Array = np.stack([start.observation for start in self._starts])

    @abstractmethod
    def step(self, actions: Array, rows: Array) -> RowsStep:
        """Step n of the rows (sorted, unique) with actions [n, 4] float32."""


class OracleRows(ClassRows):
    """Rows stepped by MuJoCo's batch and evaluated one by one by the package's code.

    The rows share one MjModel and one MjData. State that the package keeps within an episode is stored per row, so
    results depend neither on the order of the rows nor on earlier episodes.
    """

    def __init__(self, official: OfficialClass, goals: Array, num_threads: int) -> None:
        super().__init__(official, goals, num_threads)
        self._rows = [self._row(row, start) for row, start in enumerate(self._starts)]

    def step(self, actions: Array, rows: Array) -> RowsStep:
        self.physics.step(actions, rows)
        answers = [self._rows[row].step(action) for row, action in zip(rows.tolist(), actions, strict=True)]
        observations, rewards, _, truncated, infos = zip(*answers, strict=True)
        success = np.array([info["success"] == 1 for info in infos])
        info = {name: np.array([info[name] for info in infos], np.float64) for name in INFO}
        return RowsStep(np.stack(observations), np.array(rewards, np.float64), success, info, np.array(truncated))

    def _row(self, row: int, start: Start) -> Any:
        """Return another instance of the package's class that, instead of simulating, reads a row of the batch."""
        env = object.__new__(type(self._official.env))
        env.__dict__.update(start.attributes)
        env.do_simulation = lambda ctrl, n_frames: self.physics.put(row)
        return env
