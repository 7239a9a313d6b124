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
"""Spacing of the values that stand for components: the robots clip none that is so small."""

_XYZ = ("x", "y", "z")
_QUATERNION = ("qw", "qx", "qy", "qz")
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
"""Components per body of fields of MjData."""


def action_components(model: mujoco.MjModel) -> tuple[Component, ...]:
    """Name the actuators; a control is dimensionless, and the motor's gear turns it into a torque or force."""
    names: list[str] = []
    for i in range(model.nu):
        drives_joint = model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT
        joint = model.joint(model.actuator_trnid[i, 0]).name if drives_joint else ""
        names.append(model.actuator(i).name or joint or f"actuator_{i}")
    return tuple(Component(name, "1") for name in names)


def gymnasium_components(env: Any) -> tuple[Sequence[Component] | None, Sequence[Component] | None]:
    """Name the joints and actuators that a robot of gymnasium observes and takes."""
    structure, model = env.observation_structure, env.model
    joints = [*position_components(model)[structure.get("skipped_qpos", 0) :], *velocity_components(model)]
    shown = len(joints) == env.observation_space.shape[0]
    return joints if shown else None, action_components(model) if env.action_space.shape == (model.nu,) else None


def position_components(model: mujoco.MjModel) -> list[Component]:
    """Name the entries of qpos after their joints."""
    return [component for joint in range(model.njnt) for component in _positions(model, joint)]


def velocity_components(model: mujoco.MjModel) -> list[Component]:
    """Name the entries of qvel after their joints."""
    axes = [axis for joint in range(model.njnt) for axis in _freedoms(model, joint)]
    return [Component(f"{name}_velocity", f"{unit}/s") for name, unit in axes]


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
    # Components are found by where their code values appear in the observation.
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


def _positions(model: mujoco.MjModel, joint: int) -> Sequence[Component]:
    name = model.joint(joint).name or f"joint_{joint}"
    match model.jnt_type[joint]:
        case mujoco.mjtJoint.mjJNT_FREE:
            return [
                *(Component(f"{name}_{axis}", "m") for axis in _XYZ),
                *(Component(f"{name}_{axis}", "1") for axis in _QUATERNION),
            ]
        case mujoco.mjtJoint.mjJNT_BALL:
            return [Component(f"{name}_{axis}", "1") for axis in _QUATERNION]
        case mujoco.mjtJoint.mjJNT_SLIDE:
            return [Component(name, "m")]
        case _:
            return [Component(name, "rad")]


def _freedoms(model: mujoco.MjModel, joint: int) -> Sequence[tuple[str, str]]:
    """Return the degrees of freedom of a joint with the units that they move in."""
    name = model.joint(joint).name or f"joint_{joint}"
    turns = [(f"{name}_angular_{axis}", "rad") for axis in _XYZ]
    match model.jnt_type[joint]:
        case mujoco.mjtJoint.mjJNT_FREE:
            return [*((f"{name}_{axis}", "m") for axis in _XYZ), *turns]
        case mujoco.mjtJoint.mjJNT_BALL:
            return turns
        case mujoco.mjtJoint.mjJNT_SLIDE:
            return [(name, "m")]
        case _:
            return [(name, "rad")]


def _derived(model: mujoco.MjModel, name: str) -> list[Component]:
    if name == "qfrc_actuator":
        forces = {"m": "N", "rad": "N m"}
        axes = [axis for joint in range(model.njnt) for axis in _freedoms(model, joint)]
        return [Component(f"{axis}_actuator_force", forces[unit]) for axis, unit in axes]
    bodies = [model.body(i).name or f"body_{i}" for i in range(model.nbody)]
    return [Component(f"{body}_{what}", unit) for body in bodies for what, unit in _SPATIAL.get(name, ())]
