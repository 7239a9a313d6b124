"""The half-cheetah: a planar two-legged robot that runs in a given direction or at a given speed."""
# pyright: reportAttributeAccessIssue=false, reportUnknownParameterType=false
# MuJoCo's compiled modules have no type stubs.

from collections.abc import Mapping, Sequence
from typing import ClassVar

import mujoco
import numpy as np

from metaloom.pipeline.envs.contract import MetaEnv, TaskField
from metaloom.pipeline.envs.mujoco_robot import GYMNASIUM_MODELS, MujocoRobot, ObsStyle, PearlRobot, check_obs_style
from metaloom.pipeline.envs.task_classes import Classes, bins
from metaloom.pipeline.envs.task_sets import AtSpeed, OneWayOrTheOther
from metaloom.pipeline.types import Array, EpisodeBatch


class HalfCheetah(MujocoRobot, MetaEnv):
    """The half-cheetah without a task: model, observations and initial states of gymnasium's HalfCheetah-v5.

    | observation | content                                                            | unit     |
    | ----------- | ------------------------------------------------------------------ | -------- |
    | 0           | height of the front tip (rootz)                                    | m        |
    | 1           | angle of the front tip (rooty)                                     | rad      |
    | 2-4         | angles of back thigh, shin, foot                                   | rad      |
    | 5-7         | angles of front thigh, shin, foot                                  | rad      |
    | 8-9         | velocity of the front tip, forward and up                          | m/s      |
    | 10          | angular velocity of the front tip                                  | rad/s    |
    | 11-13       | angular velocities of back thigh, shin, foot                       | rad/s    |
    | 14-16       | angular velocities of front thigh, shin, foot                      | rad/s    |
    | 17-19       | only with obs_style pearl: position x, y, z of the torso           | m        |

    | action | content                                  | range  | unit                                    |
    | ------ | ---------------------------------------- | ------ | --------------------------------------- |
    | 0-2    | torque at back thigh, shin, foot         | [-1,1] | 120, 90, 60 N m (gear of the motor)     |
    | 3-5    | torque at front thigh, shin, foot        | [-1,1] | 120, 60, 30 N m                         |

    Start: joint positions U(-0.1, 0.1) around the rest pose, velocities 0.1 N(0, 1). A control step is 0.05 s (five
    physics steps). Never terminates.
    """

    frame_skip = 5
    reset_noise: float = 0.1
    normal_start = True
    control_cost: float = 0.05
    total_mass: float = 14.0

    def __init__(self, obs_style: ObsStyle = "promp", render_mode: str | None = None) -> None:
        self.obs_style = check_obs_style(self, obs_style, ("promp", "pearl", "v5"))
        if obs_style == "pearl":
            self.derived: tuple[str, ...] = ("xpos",)
        # MuJoCo 4 warns about `settotalmass` on every load. Setting the mass afterwards gives the same model.
        xml = (GYMNASIUM_MODELS / "half_cheetah.xml").read_text(encoding="utf-8")
        model = mujoco.MjModel.from_xml_string(xml.replace('settotalmass="14"', ""))
        mujoco.mj_setTotalmass(model, HalfCheetah.total_mass)
        mujoco.mj_setConst(model, mujoco.MjData(model))
        super().__init__(model, render_mode)

    def observe(self, qpos: Array, qvel: Array) -> Array:
        return np.concatenate([qpos[:, 1:], qvel], axis=1)

    def sense(self, derived: Mapping[str, Array]) -> Sequence[Array]:
        return [derived["xpos"][:, 1]] if self.obs_style == "pearl" else []

    def diagnostics(self, episodes: EpisodeBatch) -> Mapping[str, float]:
        """Return `forward_velocity`, in m/s: observation entry 8 after each step, averaged over all steps."""
        velocity = episodes.observations[:, :, 1:, 8].astype(np.float64)
        return {"forward_velocity": float(velocity[episodes.mask == 1].mean())}


class RunInDirection(OneWayOrTheOther):
    """Mixin for half-cheetahs that run forward or backward. List it before HalfCheetah. Task: see OneWayOrTheOther.

    | reward term | value                                            | unit  |
    | ----------- | ------------------------------------------------ | ----- |
    | run         | direction * v_x, mean over the step              | m/s   |
    | control     | -0.05 * ‖action‖², of the action in [-1, 1]      | 1     |
    """

    task_fields: tuple[TaskField] = (TaskField("direction", "1", "+1 to run forward, -1 to run backward"),)


class HalfCheetahDir(RunInDirection, HalfCheetah):
    """Run forward or backward; only the reward reveals which (ProMP's HalfCheetahRandDirec).

    Observation, action and start: see HalfCheetah. Task and reward: see RunInDirection.
    """


class RunAtSpeed(AtSpeed):
    """Mixin for half-cheetahs that run at a given speed. List it before HalfCheetah.

    | task field | unit | distribution |
    | ---------- | ---- | ------------ |
    | velocity   | m/s  | U(0, 3)      |

    | reward term | value                                            | unit  |
    | ----------- | ------------------------------------------------ | ----- |
    | run         | -abs(v_x - velocity), v_x: mean over the step    | m/s   |
    | control     | -0.05 * ‖action‖², of the action in [-1, 1]      | 1     |

    Other projects draw the velocity from U(0, 2), so returns are not comparable.
    """

    speeds: ClassVar[tuple[float, float]] = (0, 3)
    task_classes: Classes | None = bins("velocity", (1, 2))


class HalfCheetahVel(RunAtSpeed, HalfCheetah):
    """Run forward at a speed that only the reward reveals (ProMP's HalfCheetahRandVel).

    Observation, action and start: see HalfCheetah. Task and reward: see RunAtSpeed.
    """


class PearlCheetahDir(RunInDirection, HalfCheetah):
    """Run forward or backward (PEARL's cheetah-dir): HalfCheetahDir with PEARL's observations.

    Both directions are training tasks, so none is held out: `test_task_set` is None, and test tasks are drawn from both
    directions.
    """

    def __init__(self, obs_style: ObsStyle = "pearl", render_mode: str | None = None) -> None:
        super().__init__(obs_style, render_mode)


class PearlCheetahVel(PearlRobot, RunAtSpeed, HalfCheetah):
    """Run forward at one of 100 speeds (PEARL's cheetah-vel): HalfCheetahVel with PEARL's observations.

    The speeds are 100 draws from U(0, 3); see PearlRobot. They differ from the original's: the original seeds NumPy's
    global generator, whereas these draws come from a separate one.
    """
