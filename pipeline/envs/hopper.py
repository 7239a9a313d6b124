"""The hopper: a planar one-legged robot that can fall. Tasks vary its body."""

import numpy as np

from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.envs.mujoco_robot import MujocoRobot
from metaloom.pipeline.envs.random_dynamics import RandomDynamics
from metaloom.pipeline.envs.task_sets import FixedTasks
from metaloom.pipeline.envs.walker2d import PlanarWalker
from metaloom.pipeline.types import Array


class Hopper(PlanarWalker, MujocoRobot, MetaEnv):
    """The hopper without a task: model, observations, initial states and termination of gymnasium's Hopper-v5.

    | observation | content                                            | unit     |
    | ----------- | -------------------------------------------------- | -------- |
    | 0           | height of the torso                                | m        |
    | 1           | angle of the torso                                 | rad      |
    | 2-4         | angles of thigh, leg, foot                         | rad      |
    | 5-6         | velocity of the torso, forward and up, in [-10,10] | m/s      |
    | 7           | angular velocity of the torso, in [-10,10]         | rad/s    |
    | 8-10        | velocities of thigh, leg, foot, in [-10,10]        | rad/s    |

    | action | content                    | range  | unit                        |
    | ------ | -------------------------- | ------ | --------------------------- |
    | 0-2    | torque at thigh, leg, foot | [-1,1] | 200 N m (gear of the motor) |

    Start: joint positions and velocities U(-0.005, 0.005) around standing. Terminates unless height > 0.7 m,
    abs(angle) < 0.2 rad, and every other position and velocity is finite and within ±100. A physics step is 0.002 s.
    """

    frame_skip = 4
    min_height: float = 0.7
    max_angle: float = 0.2
    max_state: float = 100.0

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__("hopper.xml", render_mode)

    def healthy(self, qpos: Array, qvel: Array) -> Array:
        height, angle = qpos[:, 1], qpos[:, 2]
        # Comparisons with NaN are false.
        bounded = (np.abs(qpos[:, 2:]) < self.max_state).all(axis=1) & (np.abs(qvel) < self.max_state).all(axis=1)
        bounded &= np.isfinite(qpos[:, :2]).all(axis=1)
        return bounded & (height > self.min_height) & (np.abs(angle) < self.max_angle)


class HopperRandParams(RandomDynamics, Hopper):
    """Hop forward with a body whose masses, inertias, friction and damping are unknown (HopperRandParams).

    Observation, action, start and termination: see Hopper. A control step is 0.008 s (four physics steps).

    Task and reward: see RandomDynamics. BODY is torso, thigh, leg or foot; GEOM is any of these or floor; JOINT is
    thigh, leg or foot. There are 34 fields in total.
    """


class PearlHopperRandParams(FixedTasks, RandomDynamics, Hopper):
    """HopperRandParams with fixed bodies: `num_train_tasks` for training (40, ids 0-39) and `num_test_tasks` (10)."""

    def __init__(self, render_mode: str | None = None, *, num_train_tasks: int = 40, num_test_tasks: int = 10) -> None:
        super().__init__(render_mode)
        self.set_task(np.array(self.fix_tasks(num_train_tasks, num_test_tasks)[0]))
