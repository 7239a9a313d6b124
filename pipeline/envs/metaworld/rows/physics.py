"""N simulations of one class of tasks, from the starts of their episodes on."""
# pyright: reportAttributeAccessIssue=false
# MuJoCo's compiled modules have no type stubs.

import mujoco
import numpy as np
from mujoco import batch as mujoco_batch

from metaloom.pipeline.envs.metaworld.oracle import OfficialClass
from metaloom.pipeline.types import Array

_STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
_PLACES = int(mujoco.mjtStage.mjSTAGE_POS)
_NO_CONTACTS = int(mujoco.mjtDisableBit.mjDSBL_CONTACT) | int(mujoco.mjtDisableBit.mjDSBL_CONSTRAINT)
_MOCAP_QUAT = (1.0, 0.0, 1.0, 0.0)


class RowPhysics:
    """MuJoCo's batch of one class, moved by a mocap body as the package does it.

    Args:
        official: the class; other simulations may use it too, but not at the same time.
        goals: [N, R].
        num_threads: of the batch.

    Attributes:
        starts: of the rows' episodes.
        batch: MuJoCo's.
    """

    def __init__(self, official: OfficialClass, goals: Array, num_threads: int) -> None:
        self.starts = [official.start(goal) for goal in goals]
        self.batch = mujoco_batch.Batch(official.model, len(goals), num_threads)
        self._official = official
        self._body_pos, self._site_pos = (self.batch.expand(name) for name in ("body_pos", "site_pos"))
        self._body_pos[:] = [start.body_pos for start in self.starts]
        self._site_pos[:] = [start.site_pos for start in self.starts]
        self.batch.state[:] = [start.state for start in self.starts]
        self._mocap_pos, self._mocap_quat, self._ctrl = (
            self.batch.bind(name) for name in ("mocap_pos", "mocap_quat", "ctrl")
        )
        self._mocap_quat[:] = _MOCAP_QUAT
        self._qpos, self._qvel = self.batch.bind("qpos"), self.batch.bind("qvel")
        self._disabled: Array | None = None

    def step(self, actions: Array, rows: Array) -> None:
        """Step n of the rows (sorted, unique) with actions [n, 4]."""
        env = self._official.env
        # All rows as a slice, which costs no copies.
        some = slice(None) if len(rows) == len(self.starts) else rows
        moves = np.minimum(np.maximum(actions[:, :3], -1), 1) * env.action_scale
        moved = self._mocap_pos[some] + moves[:, None]
        self._mocap_pos[some] = np.minimum(np.maximum(moved, env.mocap_low), env.mocap_high)
        self._ctrl[some] = actions[:, 3:] * (1, -1)
        self.batch.step(ids=None if isinstance(some, slice) else rows, nstep=env.frame_skip)

    def place(self, rows: Array) -> None:
        """Compute where n rows' bodies are at the joints' new positions; a step leaves them one physics step behind."""
        if self._disabled is None:
            self._disabled = self.batch.expand("opt.disableflags")
        before = self._disabled.copy()
        # Contacts and constraints are no part of it, and most of the stage's time.
        self._disabled |= _NO_CONTACTS
        self.batch.forward(ids=None if len(rows) == len(self.starts) else rows, stage=_PLACES)
        self._disabled[:] = before

    def show(self, row: int) -> None:
        """Put the official model and data into the state of a row; what is derived from it is computed by nothing."""
        model = self._official.model
        model.body_pos[:], model.site_pos[:] = self._body_pos[row], self._site_pos[row]
        mujoco.mj_setState(model, self._official.data, self.batch.state[row], _STATE)

    @property
    def joints(self) -> tuple[Array, Array]:
        """[N, nq] positions and [N, nv] velocities, live."""
        return self._qpos, self._qvel
