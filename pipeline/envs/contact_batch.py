"""Batched MuJoCo physics with contact forces, which the Python binding's batch does not compute."""
# pyright: reportAttributeAccessIssue=false, reportUnknownParameterType=false
# MuJoCo's compiled modules have no type stubs.

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import mujoco
import numpy as np
from mujoco import batch as mujoco_batch

from metaloom.pipeline.types import Array

CONTACT_FORCES = "cfrc_ext"  # mjData field that `mj_step` does not update and `mj_rnePostConstraint` fills

_STATE = {name: int(getattr(mujoco.mjtState, f"mjSTATE_{name.upper()}")) for name in ("qpos", "qvel", "ctrl")}
_NO_STAGE = int(mujoco.mjtStage.mjSTAGE_NONE)


class PhysicsBatch(Protocol):
    """Interface for N simulations, implemented by `mujoco.batch.Batch` and ContactBatch."""

    def bind(self, name: str) -> Array:
        """Return a live view [N, ...] of an MjData field."""
        ...

    def reset(self, *, stage: int) -> None:
        """Reset all rows, then run the computations up to `stage`."""

    def forward(self) -> None:
        """Run the forward computations for all rows without stepping."""

    def step(self, ids: Array | None = None, nstep: int = 1) -> None:
        """Take `nstep` physics steps in the given rows (default: all)."""


class ModelBatch(PhysicsBatch, Protocol):
    """Interface for N simulations with a separate model per row."""

    def expand(self, name: str) -> Array:
        """Return a writable array [N, ...] of an MjModel field's values."""
        ...

    def set_const(self) -> None:
        """Recompute the constants that depend on written values."""


class ContactBatch:
    """N simulations whose `cfrc_ext` holds the contact forces from their last step, as in gymnasium's robots.

    It reimplements the parts of `mujoco.batch.Batch` that robots need, on top of the same C functions. Unlike
    `mujoco.batch.Batch`, it computes contact forces for each simulation, using the batch's threads. A Python loop over
    the simulations would take a tenth longer on one thread, and could not use more threads.
    """

    def __init__(self, model: mujoco.MjModel, num_rows: int, num_threads: int) -> None:
        library = self._library = batch_library()
        self._num_rows = num_rows
        self._handle = _Handle(library, model, num_rows, num_threads)
        self._batch = self._handle.address
        self._data = mujoco.MjData(model)
        self._state = self._view(library.mjb_state(self._batch), (num_rows, library.mjb_nstate(self._batch)))
        self._status = self._view(library.mjb_status(self._batch), (num_rows,), ctypes.c_int)
        self._contact_pass = ctypes.cast(library.mj_rnePostConstraint, ctypes.c_void_p)

    def bind(self, name: str) -> Array:
        """Return a live view of a simulation field, [N, ...] float64. Joint state and controls are writable."""
        shape = (self._num_rows, *getattr(self._data, name).shape)
        if name in _STATE:
            size = ctypes.c_int()
            address = self._library.mjb_stateComponent(self._batch, _STATE[name], ctypes.byref(size))
            start = (address - self._state.ctypes.data) // self._state.itemsize
            return self._state[:, start : start + size.value].reshape(shape)
        values = self._view(self._library.mjb_output(self._batch, name.encode(), None, None), shape)
        values.flags.writeable = False
        return values

    def reset(self, *, stage: int) -> None:
        self._check(None, self._library.mjb_reset(self._batch, None, self._num_rows, None, stage))

    def forward(self) -> None:
        stage = int(mujoco.mjtStage.mjSTAGE_ACC)
        self._check(None, self._library.mjb_forward(self._batch, None, self._num_rows, stage))

    def step(self, ids: Array | None = None, nstep: int = 1) -> None:
        """Step rows, then compute their contact forces."""
        rows = None if ids is None else np.ascontiguousarray(ids, np.int32)
        pointer, count = (None, self._num_rows) if rows is None else (rows.ctypes.data, len(rows))
        self._check(rows, self._library.mjb_step(self._batch, pointer, count, nstep, _NO_STAGE))
        # The function takes two arguments but is called with four, which the C ABIs of all MuJoCo platforms allow.
        self._check(rows, self._library.mjb_apply(self._batch, pointer, count, self._contact_pass, None, 0))
        # Applying a function does not refresh bound fields, but running an empty stage does.
        self._check(rows, self._library.mjb_forward(self._batch, pointer, count, _NO_STAGE))

    def _view(self, address: int, shape: tuple[int, ...], item: Any = ctypes.c_double) -> Array:
        buffer = (item * int(np.prod(shape))).from_address(address)
        # The array keeps the buffer, and thus the batch's memory, alive.
        buffer.owner = self._handle
        return np.frombuffer(buffer, np.dtype(item)).reshape(shape)

    def _check(self, rows: Array | None, num_failed: int) -> None:
        if num_failed:
            called = np.arange(self._num_rows) if rows is None else rows
            failed = called[self._status[called] != 0]
            message = self._library.mjb_error(self._batch, int(failed[0])).decode()
            raise mujoco_batch.SimulationError(failed, message, len(called))


class _Handle:
    """Owner of the C library's batch, which is freed with the last reference to it or to one of its arrays."""

    def __init__(self, library: ctypes.CDLL, model: mujoco.MjModel, num_rows: int, num_threads: int) -> None:
        self._delete = library.mjb_deleteBatch
        message = ctypes.create_string_buffer(1000)
        # Make it persistent, since contact forces are computed from each simulation's MjData after the step.
        config = _Config(num_threads, True)
        self.address: int | None = library.mjb_makeBatch(
            model._address, num_rows, ctypes.byref(config), message, len(message)
        )
        if not self.address:
            raise MemoryError(f"MuJoCo cannot make a batch of {num_rows} simulations: {message.value.decode()}")

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self._delete(self.address)


class _Config(ctypes.Structure):
    _fields_ = (("nthread", ctypes.c_int), ("persistent", ctypes.c_bool))


@cache
def batch_library() -> ctypes.CDLL:
    """Return MuJoCo's C library, with the signatures of its batch functions declared."""
    library = mujoco_library()
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "mjb_makeBatch": (pointer, [pointer, integer, pointer, pointer, integer]),
        "mjb_deleteBatch": (None, [pointer]),
        "mjb_nstate": (integer, [pointer]),
        "mjb_state": (pointer, [pointer]),
        "mjb_stateComponent": (pointer, [pointer, integer, pointer]),
        "mjb_output": (pointer, [pointer, ctypes.c_char_p, pointer, pointer]),
        "mjb_status": (pointer, [pointer]),
        "mjb_error": (ctypes.c_char_p, [pointer, integer]),
        "mjb_reset": (integer, [pointer, pointer, integer, pointer, integer]),
        "mjb_forward": (integer, [pointer, pointer, integer, integer]),
        "mjb_step": (integer, [pointer, pointer, integer, integer, integer]),
        "mjb_apply": (integer, [pointer, pointer, integer, pointer, pointer, integer]),
        "mj_rnePostConstraint": (None, [pointer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def mujoco_library() -> ctypes.CDLL:
    """Return the C library in the `mujoco` package."""
    return ctypes.CDLL(str(next(Path(mujoco.__file__).parent.glob("libmujoco.*"))))
