"""The walker: a planar two-legged robot that can fall. Tasks are directions, speeds or bodies."""

from abc import abstractmethod
from typing import ClassVar, Literal

import numpy as np

from metaloom.pipeline.envs.contract import EnvError, MetaEnv, TaskField
from metaloom.pipeline.envs.mujoco_robot import Motion, MujocoRobot
from metaloom.pipeline.envs.random_dynamics import RandomDynamics
from metaloom.pipeline.envs.task_classes import Classes, bins
from metaloom.pipeline.envs.task_sets import AtSpeed, FixedTasks, OneWayOrTheOther
from metaloom.pipeline.types import Array

ModelName = Literal["original", "v5"]
MODEL_FILES: dict[ModelName, str] = {"original": "walker2d.xml", "v5": "walker2d_v5.xml"}


class PlanarWalker:
    """Mixin for planar robots that can fall. List it before MujocoRobot.

    Joint 0 is the forward position, which observations omit. Joint 1 is the height, and joint 2 the torso angle.
    """

    reset_noise: float = 0.005
    control_cost: float = 1e-3
    alive_bonus: float = 1.0
    max_observed_velocity: float = 10.0

    def observe(self, qpos: Array, qvel: Array) -> Array:
        limit = self.max_observed_velocity
        return np.concatenate([qpos[:, 1:], np.clip(qvel, -limit, limit)], axis=1)

    def terminal(self, motion: Motion, tasks: Array) -> Array:
        return ~self.healthy(motion.qpos, motion.qvel)

    @abstractmethod
    def healthy(self, qpos: Array, qvel: Array) -> Array:
        """Return a mask [n], True where a robot is upright and within its limits."""


class Walker2d(PlanarWalker, MujocoRobot, MetaEnv):
    """The walker without a task: observations and initial states of gymnasium's Walker2d-v5.

    | observation | content                                            | unit     |
    | ----------- | -------------------------------------------------- | -------- |
    | 0           | height of the torso                                | m        |
    | 1           | angle of the torso                                 | rad      |
    | 2-4         | angles of right thigh, leg, foot                   | rad      |
    | 5-7         | angles of left thigh, leg, foot                    | rad      |
    | 8-9         | velocity of the torso, forward and up, in [-10,10] | m/s      |
    | 10          | angular velocity of the torso, in [-10,10]         | rad/s    |
    | 11-13       | velocities of right thigh, leg, foot, in [-10,10]  | rad/s    |
    | 14-16       | velocities of left thigh, leg, foot, in [-10,10]   | rad/s    |

    | action | content                          | range  | unit                          |
    | ------ | -------------------------------- | ------ | ----------------------------- |
    | 0-2    | torque at right thigh, leg, foot | [-1,1] | 100 N m (gear of the motor)   |
    | 3-5    | torque at left thigh, leg, foot  | [-1,1] | 100 N m                       |

    | option `model`     | friction of right foot, left foot                                 |
    | ------------------ | ----------------------------------------------------------------- |
    | original (default) | 0.9, 1.9: `walker2d.xml`, used for published results              |
    | v5                 | 1.9, 1.9: `walker2d_v5.xml`, gymnasium's correction               |

    Start: joint positions and velocities U(-0.005, 0.005) around standing. Terminates unless 0.8 m < height < 2 m and
    abs(angle) < 1 rad. A physics step is 0.002 s.
    """

    frame_skip = 8
    min_height: float = 0.8
    max_height: float = 2.0
    max_angle: float = 1.0

    def __init__(self, model: ModelName = "original", render_mode: str | None = None) -> None:
        if model not in tuple(MODEL_FILES):
            raise EnvError(f"{type(self).__name__}: model is {model!r}; expected one of {', '.join(MODEL_FILES)}")
        super().__init__(MODEL_FILES[model], render_mode)

    def healthy(self, qpos: Array, qvel: Array) -> Array:
        height, angle = qpos[:, 1], qpos[:, 2]
        return (height > self.min_height) & (height < self.max_height) & (np.abs(angle) < self.max_angle)


class Walker2dDir(OneWayOrTheOther, Walker2d):
    """Walk forward or backward; only the reward reveals which (ProMP's Walker2DRandDirec).

    Observation, action, option, start and termination: see Walker2d. Task: see OneWayOrTheOther. A control step is
    0.016 s (eight physics steps).

    | reward term | value                                        | unit |
    | ----------- | -------------------------------------------- | ---- |
    | run         | direction * v_x, mean over the step          | m/s  |
    | alive       | 1                                            | 1    |
    | control     | -0.001 * ‖action‖², of the action in [-1, 1] | 1    |
    """

    task_fields: tuple[TaskField] = (TaskField("direction", "1", "+1 to walk forward, -1 to walk backward"),)


class Walker2dVel(AtSpeed, Walker2d):
    """Walk forward at a speed that only the reward reveals (ProMP's Walker2DRandVel).

    Observation, action, option, start and termination: see Walker2d. A control step is 0.016 s (eight physics steps).

    | task field | unit | distribution |
    | ---------- | ---- | ------------ |
    | velocity   | m/s  | U(0, 10)     |

    | reward term | value                                            | unit |
    | ----------- | ------------------------------------------------ | ---- |
    | run         | -abs(v_x - velocity), v_x: mean over the step    | m/s  |
    | alive       | 15, so that falling does not pay                 | 1    |
    | control     | -0.001 * ‖action‖², of the action in [-1, 1]     | 1    |
    """

    speeds: ClassVar[tuple[float, float]] = (0, 10)
    task_classes: Classes | None = bins("velocity", (2.5, 5, 7.5))
    alive_bonus: float = 15.0


class Walker2dRandParams(RandomDynamics, Walker2d):
    """Walk forward with a body whose masses, inertias, friction and damping are unknown (Walker2DRandParams).

    Observation, action, option, start and termination: see Walker2d. A control step is 0.008 s (four physics steps).

    Task and reward: see RandomDynamics. BODY is torso, thigh, leg, foot, thigh_left, leg_left or foot_left; GEOM is any
    of these or floor; JOINT is any of these except torso. There are 58 fields in total.
    """


class PearlWalker2dRandParams(FixedTasks, RandomDynamics, Walker2d):
    """Walker2dRandParams with fixed bodies: `num_train_tasks` for training (40, ids 0-39) and `num_test_tasks` (10)."""

    def __init__(
        self,
        model: ModelName = "original",
        render_mode: str | None = None,
        *,
        num_train_tasks: int = 40,
        num_test_tasks: int = 10,
    ) -> None:
        super().__init__(model, render_mode)
        self.set_task(np.array(self.fix_tasks(num_train_tasks, num_test_tasks)[0]))
