"""Names and units of the observations and actions of a MuJoCo robot, read from its model."""
# pyright: reportAttributeAccessIssue=false
# MuJoCo's compiled modules have no type stubs.

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mujoco
import numpy as np

from metaloom.pipeline.envs.contract import Component
from metaloom.pipeline.types import Array

_CODE = 2.0**-20
"""Spacing of the values that identify components, small enough not to be clipped by robots."""

_XYZ = ("x", "y", "z")
_METERS, _TURNS = [(axis, "m") for axis in _XYZ], [(f"angular_{axis}", "rad") for axis in _XYZ]
_QUATERNION = [(axis, "1") for axis in ("qw", "qx", "qy", "qz")]
_OF_JOINTS = {
    mujoco.mjtJoint.mjJNT_FREE: ([*_METERS, *_QUATERNION], [*_METERS, *_TURNS]),
    mujoco.mjtJoint.mjJNT_BALL: (_QUATERNION, _TURNS),
    mujoco.mjtJoint.mjJNT_SLIDE: ([("", "m")], [("", "m")]),
    mujoco.mjtJoint.mjJNT_HINGE: ([("", "rad")], [("", "rad")]),
}
"""Coordinates of each type of joint in qpos and in qvel, with their units."""
_INERTIA = ("ixx", "iyy", "izz", "ixy", "ixz", "iyz")
_SPATIAL: Mapping[str, tuple[tuple[str, str], ...]] = {
    "xpos": tuple((axis, "m") for axis in _XYZ),
    "xipos": tuple((f"mass_center_{axis}", "m") for axis in _XYZ),
    "cinert": (
        *((entry, "kg m²") for entry in _INERTIA),
        *((f"mass_offset_{axis}", "kg m") for axis in _XYZ),
        ("mass", "kg"),
    ),
    "cvel": (*((f"angular_velocity_{a}", "rad/s") for a in _XYZ), *((f"velocity_{a}", "m/s") for a in _XYZ)),
    "cfrc_ext": (*((f"contact_torque_{a}", "N m") for a in _XYZ), *((f"contact_force_{a}", "N") for a in _XYZ)),
}
"""Components per body of MjData fields."""


def action_components(model: mujoco.MjModel) -> tuple[Component, ...]:
    """Name the actuators. Controls are dimensionless; the motor's gear converts them to torques or forces."""
    names: list[str] = []
    for i in range(model.nu):
        drives_joint = model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT
        joint = model.joint(model.actuator_trnid[i, 0]).name if drives_joint else ""
        names.append(model.actuator(i).name or joint or f"actuator_{i}")
    return tuple(Component(name, "1") for name in names)


def gymnasium_components(env: Any) -> tuple[Sequence[Component] | None, Sequence[Component] | None]:
    """Name the observations and actions of one of gymnasium's robots."""
    structure, model = env.observation_structure, env.model
    joints = [*position_components(model)[structure.get("skipped_qpos", 0) :], *velocity_components(model)]
    shown = len(joints) == env.observation_space.shape[0]
    return joints if shown else None, action_components(model) if env.action_space.shape == (model.nu,) else None


def position_components(model: mujoco.MjModel) -> list[Component]:
    """Name the entries of qpos after their joints."""
    return [component for joint in range(model.njnt) for component in _axes(model, joint, moving=False)]


def velocity_components(model: mujoco.MjModel) -> list[Component]:
    """Name the entries of qvel after their joints."""
    return [Component(f"{name}_velocity", f"{unit}/s") for name, unit in _freedoms(model)]


def _freedoms(model: mujoco.MjModel) -> list[Component]:
    return [component for joint in range(model.njnt) for component in _axes(model, joint, moving=True)]


def observed_components(
    model: mujoco.MjModel, observe: Callable[[Array, Array, Mapping[str, Array]], Array], derived: Mapping[str, Array]
) -> tuple[Component, ...] | None:
    """Name an observation's entries; None if some are not entries of qpos, qvel or `derived`.

    Args:
        model: Model of the robot.
        observe: Function from qpos [1, nq], qvel [1, nv] and the derived fields [1, ...] to observations [1, O].
        derived: Names of these fields, for their shapes.
    """
    known = [*position_components(model), *velocity_components(model)]
    for name in derived:
        known += _derived(model, name)
    # Find components by the position of their code values in the observation.
    codes = (1 + np.arange(len(known))) * _CODE
    ends = np.cumsum([model.nq, model.nv, *(field[0].size for field in derived.values())])
    qpos, qvel, *others = np.split(codes, ends[:-1])
    if ends[-1] != len(known):
        return None
    fields = {name: part.reshape(field.shape) for (name, field), part in zip(derived.items(), others, strict=True)}
    found = observe(qpos[None], qvel[None], fields)[0] / _CODE
    numbers = np.rint(found).astype(np.int64) - 1
    if not (np.array_equal(found, numbers + 1) and numbers.min() >= 0 and numbers.max() < len(known)):
        return None
    return tuple(known[number] for number in numbers)


def _axes(model: mujoco.MjModel, joint: int, *, moving: bool) -> list[Component]:
    """Name a joint's coordinates in qpos or, if `moving`, in qvel, with their units."""
    name = model.joint(joint).name or f"joint_{joint}"
    axes = _OF_JOINTS[mujoco.mjtJoint(int(model.jnt_type[joint]))][moving]
    return [Component(f"{name}_{axis}" if axis else name, unit) for axis, unit in axes]


def _derived(model: mujoco.MjModel, name: str) -> list[Component]:
    if name == "qfrc_actuator":
        forces = {"m": "N", "rad": "N m"}
        return [Component(f"{axis}_actuator_force", forces[unit]) for axis, unit in _freedoms(model)]
    bodies = [model.body(i).name or f"body_{i}" for i in range(model.nbody)]
    return [Component(f"{body}_{what}", unit) for body in bodies for what, unit in _SPATIAL.get(name, ())]
