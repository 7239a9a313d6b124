"""Rows of one class of tasks whose observations and rewards the package's own code computes: the oracle."""
# pyright: reportAttributeAccessIssue=false
# MuJoCo's compiled modules have no type stubs.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import mujoco
import numpy as np
from mujoco import batch as mujoco_batch

from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.metaworld.package import official_classes
from metaloom.pipeline.types import Array

INFO = ("near_object", "grasp_success", "grasp_reward", "in_place_reward", "obj_to_target", "unscaled_reward")
"""Numbers that every class tells in `info` besides success."""

MAX_STEPS = 500
"""Of an episode; the package refuses to step further."""

_STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
_MOCAP_QUAT = (1.0, 0.0, 1.0, 0.0)
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


@dataclass(frozen=True)
class Start:
    """The beginning of every episode with a goal, since a reset draws nothing else.

    Attributes:
        observation: [39].
        state: [S], all of MuJoCo's state that a step depends on.
        body_pos, site_pos: of the model: what a goal moves in it.
        attributes: those of the package's environment.
    """

    observation: Array
    state: Array
    body_pos: Array
    site_pos: Array
    attributes: Mapping[str, Any]


class OfficialClass:
    """The package's environment of one class, and the starts of its episodes, each simulated once.

    Args:
        name: of the class, see names.CLASSES.
        goal_visible: show the goal in the last three numbers of an observation, which are 0 otherwise.
        reward_version: of the package's rewards, v1 or v2.
    """

    def __init__(self, name: str, *, goal_visible: bool, reward_version: str) -> None:
        self.name = name
        self.env = official_classes()[name](reward_function_version=reward_version)
        self.env._set_task_called = True
        self.env._partially_observable = not goal_visible
        # Cached when the goal was still hidden, and read for the bounds of observations.
        self.env.__dict__.pop("sawyer_observation_space", None)
        self.space = self.env._random_reset_space
        self.model: mujoco.MjModel = self.env.model
        self.data: mujoco.MjData = self.env.data
        self._starts: dict[bytes, Start] = {}

    def goal_of(self, task_goal: Array) -> Array:
        """The goal without padding.

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
            if draws > _MAX_DRAWS:  # it draws again and again until a goal is to its liking
                raise EnvError(
                    f"Meta-World: {self.name} does not accept the goal {goal.tolist()}, most likely because object and "
                    "goal are too close; required one as the benchmark draws them"
                )
            return goal

        env._get_state_rand_vec = given
        observation, _ = env.reset()
        state = np.empty(mujoco.mj_stateSize(self.model, _STATE))
        mujoco.mj_getState(self.model, self.data, state, _STATE)
        attributes = {name: value for name, value in vars(env).items() if name != "_get_state_rand_vec"}
        return Start(observation, state, self.model.body_pos.copy(), self.model.site_pos.copy(), attributes)


class OracleRows:
    """N rows of one class: MuJoCo's batch steps them, and the package looks at each of them in turn.

    The rows share one MjModel and one MjData. Whatever the package keeps of an episode belongs to the row, so that
    neither the order of the rows nor earlier episodes make a difference.

    Args:
        official: the class; other rows may use it too, but not at the same time.
        goals: [N, R].
        num_threads: of the batch.
    """

    def __init__(self, official: OfficialClass, goals: Array, num_threads: int) -> None:
        starts = [official.start(goal) for goal in goals]
        self._official = official
        self._batch = mujoco_batch.Batch(official.model, len(starts), num_threads)
        self._body_pos, self._site_pos = (self._batch.expand(name) for name in ("body_pos", "site_pos"))
        self._body_pos[:] = [start.body_pos for start in starts]
        self._site_pos[:] = [start.site_pos for start in starts]
        self._batch.state[:] = [start.state for start in starts]
        self._mocap_pos, self._mocap_quat, self._ctrl = (
            self._batch.bind(name) for name in ("mocap_pos", "mocap_quat", "ctrl")
        )
        self._qpos, self._qvel = self._batch.bind("qpos"), self._batch.bind("qvel")
        self._rows = [self._row(row, start) for row, start in enumerate(starts)]
        self.observations = np.stack([start.observation for start in starts])

    def step(self, actions: Array, rows: Array) -> RowsStep:
        """Step n of the rows (sorted, unique) with actions [n, 4] float32."""
        env = self._official.env
        moved = self._mocap_pos[rows] + (np.clip(actions[:, :3], -1, 1) * env.action_scale)[:, None]
        self._mocap_pos[rows] = np.clip(moved, env.mocap_low, env.mocap_high)
        self._mocap_quat[rows] = _MOCAP_QUAT
        self._ctrl[rows] = np.stack([actions[:, 3], -actions[:, 3]], axis=1)
        self._batch.step(ids=rows, nstep=env.frame_skip)
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
        """One more object of the package's class, whose steps take over what the batch has simulated."""
        env = object.__new__(type(self._official.env))
        env.__dict__.update(start.attributes)
        env.do_simulation = lambda ctrl, n_frames: self._take_over(row)
        return env

    def _take_over(self, row: int) -> None:
        model, data = self._official.model, self._official.data
        model.body_pos[:], model.site_pos[:] = self._body_pos[row], self._site_pos[row]
        mujoco.mj_setState(model, data, self._batch.state[row], _STATE)

    @property
    def joints(self) -> tuple[Array, Array]:
        """[N, nq] positions and [N, nv] velocities, live."""
        return self._qpos, self._qvel

    def show(self, row: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        """Model and data in the state of a row, until another row is looked at."""
        self._take_over(row)
        mujoco.mj_forward(self._official.model, self._official.data)
        return self._official.model, self._official.data
