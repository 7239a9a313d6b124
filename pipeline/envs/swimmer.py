"""The swimmer: three linked rods that swim at a given speed in a viscous fluid."""

from typing import ClassVar

import numpy as np

from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.envs.mujoco_robot import MujocoRobot, ObsStyle, check_obs_style
from metaloom.pipeline.envs.task_classes import Classes, bins
from metaloom.pipeline.envs.task_sets import AtSpeed
from metaloom.pipeline.types import Array


class SwimmerVel(AtSpeed, MujocoRobot, MetaEnv):
    """Swim forward at a speed that only the reward reveals (ProMP's SwimmerRandVel).

    Uses the model, observations and initial states of gymnasium's Swimmer-v5.

    | observation | content                                            | unit  |
    | ----------- | -------------------------------------------------- | ----- |
    | 0           | angle of the front rod                             | rad   |
    | 1-2         | angles of the first and second joint               | rad   |
    | 3-4         | velocity of the front rod, x y                     | m/s   |
    | 5           | angular velocity of the front rod                  | rad/s |
    | 6-7         | angular velocities of the first and second joint   | rad/s |

    | action | content                              | range  | unit                     |
    | ------ | ------------------------------------ | ------ | ------------------------ |
    | 0-1    | torque at the first and second joint | [-1,1] | 150 N m                  |

    | task field | unit | distribution |
    | ---------- | ---- | ------------ |
    | velocity   | m/s  | U(0.1, 0.2)  |

    | reward term | value                                              | unit  |
    | ----------- | -------------------------------------------------- | ----- |
    | run         | -abs(v_x - velocity), v_x: mean over the step      | m/s   |
    | control     | -1e-4 * ‖action‖²                                  | 1     |

    Start: joint positions and velocities U(-0.1, 0.1) around the rest pose. A control step is 0.04 s (four physics
    steps). Never terminates. The original's reward has the wrong sign, which is corrected here. PEARL has no
    swimmer, so obs_style is promp or v5, which are the same.
    """

    frame_skip = 4
    reset_noise: float = 0.1
    control_cost: float = 1e-4
    speeds: ClassVar[tuple[float, float]] = (0.1, 0.2)
    task_classes: Classes | None = bins("velocity", (0.15,))

    def __init__(self, obs_style: ObsStyle = "promp", render_mode: str | None = None) -> None:
        self.obs_style = check_obs_style(self, obs_style, ("promp", "v5"))
        super().__init__("swimmer.xml", render_mode)

    def observe(self, qpos: Array, qvel: Array) -> Array:
        return np.concatenate([qpos[:, 2:], qvel], axis=1)
