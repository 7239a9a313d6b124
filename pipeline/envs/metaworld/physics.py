"""N simulations of one class of tasks, from the starts of their episodes on."""
# pyright: reportAttributeAccessIssue=false
# MuJoCo's compiled modules have no type stubs.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from mujoco import batch as mujoco_batch

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
        body_pos, site_pos: of the model: what a goal moves in it.
        attributes: those of the package's environment.
    """

    observation: Array
    state: Array
    body_pos: Array
    site_pos: Array
    attributes: Mapping[str, Any]


class RowPhysics:
    """MuJoCo's batch of one class, moved by a mocap body as the package does it.

    Args:
        env: the package's environment of the class; other simulations may use it too, but not at the same time.
        starts: of the N rows' episodes.
        num_threads: of the batch.

    Attributes:
        batch: MuJoCo's.
        joints: [N, nq] positions and [N, nv] velocities, live.
    """

    def __init__(self, env: Any, starts: Sequence[Start], num_threads: int) -> None:
        self.batch = mujoco_batch.Batch(env.model, len(starts), num_threads)
        self._env, self._num_rows = env, len(starts)
        self._body_pos, self._site_pos = (self.batch.expand(name) for name in ("body_pos", "site_pos"))
        self._body_pos[:] = [start.body_pos for start in starts]
        self._site_pos[:] = [start.site_pos for start in starts]
        self.batch.state[:] = [start.state for start in starts]
        self._mocap_pos, mocap_quat, self._ctrl, qpos, qvel = (
            self.batch.bind(name) for name in ("mocap_pos", "mocap_quat", "ctrl", "qpos", "qvel")
        )
        mocap_quat[:] = _MOCAP_QUAT
        self.joints = qpos, qvel
        self._disabled: Array | None = None

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
        """Compute where n rows' bodies are at the joints' new positions; a step leaves them one physics step behind."""
        if self._disabled is None:
            self._disabled = self.batch.expand("opt.disableflags")
        before = self._disabled.copy()
        # Contacts and constraints are no part of it, and most of the stage's time.
        self._disabled |= _NO_CONTACTS
        self.batch.forward(ids=self._ids(rows), stage=_PLACES)
        self._disabled[:] = before

    def put(self, row: int) -> None:
        """Set the package's model and data to the state of a row; nothing is derived from it yet."""
        model = self._env.model
        model.body_pos[:], model.site_pos[:] = self._body_pos[row], self._site_pos[row]
        mujoco.mj_setState(model, self._env.data, self.batch.state[row], STATE)

    def show(self, row: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        """The package's model and data in the state of a row, until another row is looked at."""
        self.put(row)
        mujoco.mj_forward(self._env.model, self._env.data)
        return self._env.model, self._env.data

    def some(self, rows: Array) -> Array | slice:
        """The rows as an index; all of them as a slice, which makes views instead of copies."""
        return slice(None) if len(rows) == self._num_rows else rows

    def _ids(self, rows: Array) -> Array | None:
        return None if len(rows) == self._num_rows else rows
