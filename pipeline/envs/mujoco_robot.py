"""Robots simulated by MuJoCo, individually or in multithreaded batches."""

# pyright: reportAttributeAccessIssue=false, reportUnknownParameterType=false
import copy
import ctypes
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import gymnasium
import mujoco
import numpy as np
from gymnasium.spaces import Box
from mujoco.batch import Batch

from metaloom.pipeline.envs.contact_batch import CONTACT_FORCES, ContactBatch, ModelBatch, PhysicsBatch, mujoco_library
from metaloom.pipeline.envs.contract import BatchStep, Component, EnvError, MetaEnv, RowBatch, keeps_rules
from metaloom.pipeline.envs.task_sets import FixedTasks
from metaloom.pipeline.types import Array

_CODE = 2.0**-20  # spacing of the code values that identify components, small enough that no robot clips them

_XYZ = ("x", "y", "z")
_METERS, _TURNS = [(axis, "m") for axis in _XYZ], [(f"angular_{axis}", "rad") for axis in _XYZ]
_QUATERNION = [(axis, "1") for axis in ("qw", "qx", "qy", "qz")]
_OF_JOINTS = {
    mujoco.mjtJoint.mjJNT_FREE: ([*_METERS, *_QUATERNION], [*_METERS, *_TURNS]),
    mujoco.mjtJoint.mjJNT_BALL: (_QUATERNION, _TURNS),
    mujoco.mjtJoint.mjJNT_SLIDE: ([("", "m")], [("", "m")]),
    mujoco.mjtJoint.mjJNT_HINGE: ([("", "rad")], [("", "rad")]),
}
"""Coordinates of a joint in qpos and in qvel, with units, keyed by joint type."""
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
"""Components per body, with units, keyed by MjData field."""


def action_components(model: mujoco.MjModel) -> tuple[Component, ...]:
    """Return a component for each actuator. Controls are dimensionless; gears convert them to torques or forces."""
    found: list[Component] = []
    for i in range(model.nu):
        drives_joint = model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT
        joint = model.joint(model.actuator_trnid[i, 0]).name if drives_joint else ""
        found.append(Component(model.actuator(i).name or joint or f"actuator_{i}"))
    return tuple(found)


def gymnasium_components(env: Any) -> tuple[Sequence[Component] | None, Sequence[Component] | None]:
    """Return the observation and action components of a gymnasium robot, each None if it cannot be determined."""
    structure, model = env.observation_structure, env.model
    joints = [*position_components(model)[structure.get("skipped_qpos", 0) :], *velocity_components(model)]
    shown = len(joints) == env.observation_space.shape[0]
    return joints if shown else None, action_components(model) if env.action_space.shape == (model.nu,) else None


def position_components(model: mujoco.MjModel) -> list[Component]:
    """Return a component for each entry of qpos, named after its joint."""
    return [component for joint in range(model.njnt) for component in _axes(model, joint, moving=False)]


def velocity_components(model: mujoco.MjModel) -> list[Component]:
    """Return a component for each entry of qvel, named after its joint."""
    return [Component(f"{name}_velocity", f"{unit}/s") for name, unit in _freedoms(model)]


def _freedoms(model: mujoco.MjModel) -> list[Component]:
    return [component for joint in range(model.njnt) for component in _axes(model, joint, moving=True)]


def observed_components(
    model: mujoco.MjModel, observe: Callable[[Array, Array, Mapping[str, Array]], Array], derived: Mapping[str, Array]
) -> tuple[Component, ...] | None:
    """Return a component for each observation entry, or None if some entry is not from qpos, qvel or `derived`.

    `observe` maps qpos [1, nq], qvel [1, nv] and derived fields [1, ...] to observations [1, O]. Of the fields in
    `derived`, keyed by name, only the shapes are used.
    """
    joints = [*position_components(model), *velocity_components(model)]
    known = [*joints, *(component for name in derived for component in _derived(model, name))]
    # Set each component to a code value, and find the code values in the observation.
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
    """Return the components of a joint in qpos or, if `moving`, in qvel."""
    name = model.joint(joint).name or f"joint_{joint}"
    axes = _OF_JOINTS[mujoco.mjtJoint(int(model.jnt_type[joint]))][moving]
    return [Component(f"{name}_{axis}" if axis else name, unit) for axis, unit in axes]


def _derived(model: mujoco.MjModel, name: str) -> list[Component]:
    if name == "qfrc_actuator":
        forces = {"m": "N", "rad": "N m"}
        return [Component(f"{axis}_actuator_force", forces[unit]) for axis, unit in _freedoms(model)]
    bodies = [model.body(i).name or f"body_{i}" for i in range(model.nbody)]
    return [Component(f"{body}_{what}", unit) for body in bodies for what, unit in _SPATIAL.get(name, ())]


ObsStyle = Literal["promp", "pearl", "v5"]  # observation style: ProMP's, PEARL's, or that in gymnasium's v5 robots

GYMNASIUM_MODELS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"


@dataclass(frozen=True)
class Motion:
    """One control step in n simulations."""

    qpos_before: Array  # joint positions before the step, [n, nq]
    qpos: Array  # joint positions after the step, [n, nq]
    qvel: Array  # joint velocities after the step, [n, nv]
    actions: Array  # controls that were applied, [n, A]
    dt: float  # duration of the step in seconds
    # The robot's `derived_before` fields before the step, and `derived` fields after it, keyed by name, [n, ...] each.
    derived_before: Mapping[str, Array] = field(default_factory=dict)
    derived: Mapping[str, Array] = field(default_factory=dict)


class MujocoRobot(gymnasium.Env[Array, Array]):
    """Base class for robots, used together with MetaEnv. A subclass defines the rules for n simulations.

    A single robot (`step`) and a batch apply the same rules row by row, so their results are bitwise identical. Physics
    and observations are float64.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    frame_skip: ClassVar[int]  # physics steps per control step
    reset_noise: ClassVar[float]  # maximum deviation of the initial joint positions from the rest pose
    normal_start: ClassVar[bool] = False
    """True if initial velocities are normal with standard deviation `reset_noise` instead of uniform."""
    control_cost: float
    alive_bonus: float | None = None  # reward for each step, including the last one. None: there is no such term.
    derived: tuple[str, ...] = ()
    """MjData fields that the rules read in addition to joint positions and velocities. Their values are what `mj_step`
    leaves: those for the last state that the integrator evaluated, which lags the joints by one physics step with
    Euler. If `derived` includes the contact forces, `cfrc_ext`, they are computed once per control step; they are zero
    after a reset.
    """
    derived_before: tuple[str, ...] = ()
    """The `derived` fields that `reward_terms` also reads as they were before the step."""

    def __init__(self, model: mujoco.MjModel | str, render_mode: str | None = None) -> None:
        """Build a robot from a model or from the name of one of gymnasium's model files."""
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise EnvError(f"{type(self).__name__}: render_mode is {render_mode!r}; expected None or 'rgb_array'")
        if isinstance(model, str):
            model = mujoco.MjModel.from_xml_path(str(GYMNASIUM_MODELS / model))
        self.model: mujoco.MjModel = model
        self.data: Any = mujoco.MjData(model)
        self.render_mode = render_mode
        self.dt: Any = model.opt.timestep * self.frame_skip
        # As in gymnasium's robots, a video with one frame per step plays in real time.
        self.metadata = {**type(self).metadata, "render_fps": round(1 / self.dt)}
        self.observation_space: gymnasium.Space[Any] = Box(-np.inf, np.inf, self._observation().shape, np.float64)
        low, high = model.actuator_ctrlrange.T
        self.action_space: gymnasium.Space[Any] = Box(low, high, dtype=np.float64)
        self.action_components: Sequence[tuple[str, str]] | None = action_components(model)
        self._renderer: mujoco.Renderer | None = None
        self.prepare_model()

    @cached_property
    def observation_components(self) -> Sequence[tuple[str, str]] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Names and units, derived from the model and the rules; None if observations are not a selection of fields."""
        found = observed_components(self.model, self.observations, self._read(self.derived))
        return found if found is not None and self.observation_space.shape == (len(found),) else None

    def start(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Draw an episode's initial joint positions [nq] and velocities [nv]; by default, near the rest pose."""
        noise, nv = self.reset_noise, self.model.nv
        qpos = self.model.qpos0 + rng.uniform(-noise, noise, self.model.nq)
        return qpos, noise * rng.standard_normal(nv) if self.normal_start else rng.uniform(-noise, noise, nv)

    @abstractmethod
    def observe(self, qpos: Array, qvel: Array) -> Array:
        """Return observations [n, O] for qpos [n, nq] and qvel [n, nv]. Columns from `sense` are appended to these."""

    def sense(self, derived: Mapping[str, Array]) -> Sequence[Array]:
        """Return additional observation columns, [n, ...] each, from the `derived` fields. None by default."""
        return ()

    def reward_terms(self, motion: Motion, tasks: Array) -> dict[str, Array]:
        """Return the reward terms for a step, keyed by name, [n] each.

        The default terms are `run`, from the step's mean forward velocity (joint 0 must be the forward position);
        `alive`, if enabled; and `control` = -control_cost ‖action‖².
        """
        velocity = (motion.qpos[:, 0] - motion.qpos_before[:, 0]) / motion.dt
        alive = {} if self.alive_bonus is None else {"alive": np.full(len(velocity), self.alive_bonus)}
        control = -self.control_cost * squared_norm(motion.actions)
        return {"run": self.run_reward(velocity, tasks), **alive, "control": control}

    @abstractmethod
    def run_reward(self, velocity: Array, tasks: Array) -> Array:
        """Return the reward [n] for velocities in m/s: [n] for forward velocities, or [n, 2] in the plane."""

    def terminal(self, motion: Motion, tasks: Array) -> Array:
        """Return a mask [n], True where the step terminated the episode. By default, no step does."""
        return np.zeros(len(motion.qpos), np.bool_)

    def prepare_model(self) -> None:
        """Finish setting up the robot, at the end of its construction. The default does nothing."""

    def write_models(self, batch: ModelBatch, tasks: Array) -> None:
        """Write the model changes for tasks [N, P] into the rows of a batch. The default does nothing.

        Robots that override this method must also update their own model in `set_task`.
        """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:], self.data.qvel[:] = self.start(self.np_random)
        mujoco.mj_forward(self.model, self.data)
        return self._observation(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        qpos_before, derived_before = self.data.qpos.copy(), self._read(self.derived_before, copy=True)
        self.data.ctrl[:] = action
        mujoco.mj_step(self.model, self.data, nstep=self.frame_skip)
        if CONTACT_FORCES in self.derived:
            mujoco.mj_rnePostConstraint(self.model, self.data)
        qpos, qvel, derived = self.data.qpos[None], self.data.qvel[None], self._read(self.derived)
        actions = np.asarray(action, np.float64)[None]
        motion = Motion(qpos_before[None], qpos, qvel, actions, self.dt, derived_before, derived)
        assert isinstance(self, MetaEnv), "a robot has tasks"
        tasks = self.task[None]
        terms = {name: float(term[0]) for name, term in self.reward_terms(motion, tasks).items()}
        terminated = bool(self.terminal(motion, tasks)[0])
        return self._observation(), sum(terms.values()), terminated, False, {"reward_terms": terms}

    def observations(self, qpos: Array, qvel: Array, derived: Mapping[str, Array]) -> Array:
        """Return complete observations, [n, O], including the columns from `sense`."""
        columns = [self.observe(qpos, qvel), *(field.reshape(len(qpos), -1) for field in self.sense(derived))]
        return columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)

    def _observation(self) -> Array:
        return self.observations(self.data.qpos[None], self.data.qvel[None], self._read(self.derived))[0]

    def _read(self, names: tuple[str, ...], copy: bool = False) -> dict[str, Array]:
        """Return fields of the robot's MjData, keyed by name, [1, ...] each."""
        return {name: np.array(getattr(self.data, name), copy=copy or None)[None] for name in names}

    def batch(self, num_rows: int, num_threads: int) -> "MujocoBatch | None":
        return MujocoBatch(self, num_rows, num_threads) if keeps_rules(self, MujocoRobot) else None

    def render(self) -> Any:
        """Return an image as an array [height, width, 3] of uint8, or None without render_mode="rgb_array"."""
        if self.render_mode is None:
            return None
        if self._renderer is None:
            self._renderer = mujoco.Renderer(self.model)
        self._renderer.update_scene(self.data, camera="track" if self.model.ncam else -1)
        return self._renderer.render()

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


class PearlRobot(FixedTasks):
    """Mixin for robots with PEARL's observations and a fixed set of tasks. List it before the robot's other classes.

    | option            | tasks, drawn once from the robot's task distribution         |
    | ----------------- | ------------------------------------------------------------ |
    | `num_train_tasks` | training tasks, default 100, all equally likely; ids from 0  |
    | `num_test_tasks`  | test tasks (`test_task_set`), default 30                     |
    """

    def __init__(
        self,
        obs_style: ObsStyle = "pearl",
        render_mode: str | None = None,
        *,
        num_train_tasks: int = 100,
        num_test_tasks: int = 30,
    ) -> None:
        super().__init__(obs_style, render_mode)  # pyright: ignore[reportCallIssue]
        self.fix_tasks(num_train_tasks, num_test_tasks)


class MujocoBatch(RowBatch):
    """Batch of N simulations of a robot. Results do not depend on the number of threads."""

    def __init__(self, robot: MujocoRobot, num_rows: int, num_threads: int) -> None:
        self._robot = robot
        contact_forces = CONTACT_FORCES in robot.derived
        if contact_forces and type(robot).write_models is not MujocoRobot.write_models:
            raise EnvError(f"{type(robot).__name__} has contact forces and a model per row; use only one of them")
        self._batch = physics_batch(robot.model, num_rows, num_threads, contact_forces=contact_forces)
        self._qpos, self._qvel, self._ctrl = (self._batch.bind(name) for name in ("qpos", "qvel", "ctrl"))
        self._derived = {name: self._batch.bind(name) for name in robot.derived}
        self.num_rows = num_rows
        self.observation_size: int = robot.observation_space.shape[0]  # pyright: ignore[reportOptionalSubscript]
        self.action_size: Any = robot.model.nu

    def begin(self, rngs: Sequence[np.random.Generator]) -> Array:
        stop_profiling_timer()
        if isinstance(self._batch, Batch):
            self._robot.write_models(self._batch, self.tasks)
        self._batch.reset(stage=mujoco.mjtStage.mjSTAGE_NONE.value)
        for row, rng in enumerate(rngs):
            self._qpos[row], self._qvel[row] = self._robot.start(rng)
        # Do this as a single robot's reset does, since the solver's first step starts from this state.
        self._batch.forward()
        return self._robot.observations(self._qpos, self._qvel, self._derived)

    def step(self, actions: Array, rows: Array) -> BatchStep:
        ids, at = (None, slice(None)) if len(rows) == self.num_rows else (rows, rows)
        robot = self._robot
        qpos_before = self._qpos[at].copy()
        derived_before = {name: self._derived[name][at].copy() for name in robot.derived_before}
        self._ctrl[at] = actions
        self._batch.step(ids=ids, nstep=robot.frame_skip)
        qpos, qvel, tasks = self._qpos[at], self._qvel[at], self.tasks[at]
        derived = {name: field[at] for name, field in self._derived.items()}
        motion = Motion(qpos_before, qpos, qvel, actions, robot.dt, derived_before, derived)
        terms, terminated = robot.reward_terms(motion, tasks), robot.terminal(motion, tasks)
        return BatchStep(robot.observations(qpos, qvel, derived), terms, terminated, np.zeros(len(actions), np.bool_))

    @property
    def state(self) -> Array:
        return np.concatenate([self._qpos, self._qvel], axis=1)

    def close(self) -> None:
        # The batch frees its threads when it is garbage-collected, which any view delays.
        del self._batch, self._qpos, self._qvel, self._ctrl, self._derived


def physics_batch(model: mujoco.MjModel, num_rows: int, num_threads: int, *, contact_forces: bool) -> PhysicsBatch:
    """Return a MuJoCo batch for a robot's model, with contact islands disabled and contact forces if requested."""
    model = copy.copy(model)
    # Solving contacts by islands gives identical results, but takes longer if there is only one island.
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_ISLAND
    if contact_forces:
        return ContactBatch(model, num_rows, num_threads)
    return Batch(model, num_rows, num_threads)


def squared_norm(vectors: Array) -> Array:
    """Return each row's sum of squares, [n], for vectors [n, ...]. A row's bits do not depend on n."""
    # In C order, NumPy sums each row separately.
    return np.square(vectors, order="C").reshape(len(vectors), -1).sum(axis=1)


def check_obs_style(robot: MujocoRobot, obs_style: ObsStyle, allowed: tuple[ObsStyle, ...]) -> ObsStyle:
    """Return an observation style, or raise EnvError if the robot does not offer it."""
    if obs_style not in allowed:
        raise EnvError(f"{type(robot).__name__}: obs_style is {obs_style!r}; expected one of {', '.join(allowed)}")
    return obs_style


def stop_profiling_timer() -> None:
    """Stop the Python binding from timing all parts of each physics step, which costs a tenth of the step's time.

    The binding installs a C callback, which can be removed only by clearing the pointer: `set_mjcb_time(None)` restores
    it. Call this before each rollout, because other users of MuJoCo in this process may restore the callback too.
    """
    ctypes.c_void_p.in_dll(mujoco_library(), "mjcb_time").value = None
