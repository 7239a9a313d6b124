"""Robots whose tasks vary the masses, inertias, friction and damping of the body."""
# pyright: reportAttributeAccessIssue=false, reportUnknownParameterType=false
# MuJoCo's compiled modules have no type stubs.

from dataclasses import dataclass
from typing import Literal

import mujoco
import numpy as np

from metaloom.pipeline.envs.contact_batch import ModelBatch
from metaloom.pipeline.envs.contract import EnvError, MetaEnv, TaskField, check_task
from metaloom.pipeline.envs.mujoco_robot import MujocoRobot
from metaloom.pipeline.types import Array


@dataclass(frozen=True)
class ModelArray:
    """A field of MjModel whose entries a task scales by base^U(-3, 3)."""

    name: str
    base: float
    quantity: str  # name used in task fields
    owner: Literal["body", "geom", "joint"]  # what a row describes
    parts: tuple[str, ...] = ("",)  # names of a row's entries


ARRAYS = (
    ModelArray("body_mass", 1.5, "mass", "body"),
    ModelArray("body_inertia", 1.5, "inertia", "body", ("_1", "_2", "_3")),
    ModelArray("geom_friction", 1.5, "friction", "geom", ("_sliding", "_torsional", "_rolling")),
    ModelArray("dof_damping", 1.3, "damping", "joint"),
)
MAX_EXPONENT = 3.0


@dataclass(frozen=True)
class _Varied:
    """A model array's nonzero entries, which a task scales, with the array's values in the model file."""

    array: ModelArray
    values: Array
    places: Array
    columns: slice


class RandomDynamics(MujocoRobot, MetaEnv):
    """Base class for robots with one task field, a multiplier, per nonzero entry of ARRAYS in the model file.

    | task field                                                | unit | distribution  |
    | --------------------------------------------------------- | ---- | ------------- |
    | BODY_mass                                                 | 1    | 1.5^U(-3, 3)  |
    | BODY_inertia_1, _2, _3: about its principal axes          | 1    | 1.5^U(-3, 3)  |
    | GEOM_friction_sliding, _torsional, _rolling               | 1    | 1.5^U(-3, 3)  |
    | JOINT_damping                                             | 1    | 1.3^U(-3, 3)  |

    | reward term | value                                        | unit |
    | ----------- | -------------------------------------------- | ---- |
    | run         | v_x, mean over the step                      | m/s  |
    | alive       | 1                                            | 1    |
    | control     | -0.001 * ‖action‖², of the action in [-1, 1] | 1    |

    A task takes effect at the next physics step. Unlike in the original, MuJoCo's derived constants are updated too.
    """

    # For the walker, the original requests 5 but its base class uses 4.
    frame_skip = 4

    def run_reward(self, velocity: Array, tasks: Array) -> Array:
        """Return the forward velocity [n]."""
        return velocity

    def prepare_model(self) -> None:
        """Derive the task fields from the model, and set an initial task."""
        fields: list[TaskField] = []
        varied: list[_Varied] = []
        for array in ARRAYS:
            values = getattr(self.model, array.name).copy()
            places = np.flatnonzero(values)
            names = _names(self.model, array)
            columns = slice(len(fields), len(fields) + len(places))
            what = f"multiplier of a number in the model's {array.name}"
            fields += [TaskField(names[i], "1", f"{what}: {names[i].replace('_', ' ')}") for i in places]
            varied.append(_Varied(array, values, places, columns))
        self.task_fields: tuple[TaskField, ...] = tuple(fields)
        self._varied = tuple(varied)
        self._scratch = mujoco.MjData(self.model)
        # Set a task now, since the first episode may begin before `task` is read.
        self.set_task(RandomDynamics.sample_tasks(self, 1, np.random.default_rng(0))[0])

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> Array:
        tasks = np.empty((num_tasks, len(self.task_fields)))
        for varied in self._varied:
            size = (num_tasks, len(varied.places))
            tasks[:, varied.columns] = varied.array.base ** rng.uniform(-MAX_EXPONENT, MAX_EXPONENT, size)
        return tasks

    def set_task(self, task: Array) -> None:
        multipliers = check_task(self, task)
        self._check_positive(multipliers[None])
        super().set_task(multipliers)
        for varied in self._varied:
            _write(getattr(self.model, varied.array.name)[None], varied, multipliers[None])
        # Use separate MjData, since this moves the robot to its rest pose.
        mujoco.mj_setConst(self.model, self._scratch)

    def write_models(self, batch: ModelBatch, tasks: Array) -> None:
        self._check_positive(tasks)
        for varied in self._varied:
            _write(batch.expand(varied.array.name), varied, tasks)
        batch.set_const()

    def _check_positive(self, tasks: Array) -> None:
        if tasks.min() <= 0:
            field = self.task_fields[int(tasks.min(axis=0).argmin())]
            raise EnvError(f"{type(self).__name__}: {field.name} of a task is {tasks.min()}; expected a number above 0")


def _write(models: Array, varied: _Varied, tasks: Array) -> None:
    """Write the values for tasks [n, P] into an array [n, ...] of n models, always relative to the model file."""
    values = np.repeat(varied.values.reshape(1, -1), len(tasks), axis=0)
    values[:, varied.places] *= tasks[:, varied.columns]
    models[:] = values.reshape(models.shape)


def _names(model: mujoco.MjModel, array: ModelArray) -> list[str]:
    """Return the name of the task field for each entry of the array, in order."""
    if array.owner == "joint":
        owners = [model.joint(joint).name for joint in model.dof_jntid]
    else:
        count, get = {"body": (model.nbody, model.body), "geom": (model.ngeom, model.geom)}[array.owner]
        owners = [get(i).name for i in range(count)]
    return [
        f"{owner.removesuffix('_' + array.owner)}_{array.quantity}{part}" for owner in owners for part in array.parts
    ]
