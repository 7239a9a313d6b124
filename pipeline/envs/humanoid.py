"""The humanoid: a robot with seventeen motors that walks in a given direction."""

from collections.abc import Mapping, Sequence

import numpy as np

from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.envs.mujoco_robot import Motion, MujocoRobot, ObsStyle, PearlRobot, check_obs_style, squared_norm
from metaloom.pipeline.envs.task_sets import AlongX, AnyDirection
from metaloom.pipeline.types import Array


class Humanoid(MujocoRobot, MetaEnv):
    """The humanoid without a task: model, physics and initial states of gymnasium's Humanoid-v5.

    | observation | content                                                                   | unit            |
    | ----------- | ------------------------------------------------------------------------- | --------------- |
    | 0           | height of the torso                                                       | m               |
    | 1-4         | orientation of the torso, quaternion w x y z                              | 1               |
    | 5-7         | angles of abdomen z, y, x                                                 | rad             |
    | 8-11, 12-15 | angles of right hip x, z, y and knee; same for the left                   | rad             |
    | 16-18, 19-21 | angles of right shoulder 1, 2 and elbow; same for the left               | rad             |
    | 22-24       | velocity of the torso, x y z                                              | m/s             |
    | 25-27       | angular velocity of the torso, x y z                                      | rad/s           |
    | 28-44       | angular velocities in the order of 5-21                                   | rad/s           |
    | 45-184      | per body: inertia (6) about the robot's center of mass, m·offset (3), mass m | kg m², kg m, kg |
    | 185-268     | per body: angular (3) and linear (3) velocity                             | rad/s, m/s      |
    | 269-291     | torque of the motor at each degree of freedom                             | N m             |
    | 292-375     | per body: contact torque (3) and force (3)                                | N m, N          |

    | action | content                                               | range       | unit                  |
    | ------ | ----------------------------------------------------- | ----------- | --------------------- |
    | 0-2    | torque at abdomen y, z, x                             | [-0.4, 0.4] | 100 N m               |
    | 3-6    | torque at right hip x, z, y and knee                  | [-0.4, 0.4] | 100, 100, 300, 200 N m |
    | 7-10   | torque at left hip x, z, y and knee                   | [-0.4, 0.4] | 100, 100, 300, 200 N m |
    | 11-13  | torque at right shoulder 1, 2 and elbow               | [-0.4, 0.4] | 25 N m                |
    | 14-16  | torque at left shoulder 1, 2 and elbow                | [-0.4, 0.4] | 25 N m                |

    The table describes obs_style promp and pearl, which are the same. Each of the last four groups starts with entries
    that are always 0: for the world, or for six degrees of freedom without a motor. v5 omits them (size 348).

    | reward term | value                                                              | unit  |
    | ----------- | ------------------------------------------------------------------ | ----- |
    | run         | 1.25 * direction · v of the center of mass, mean over the step     | m/s   |
    | survive     | 5 at each step                                                     | 1     |
    | control     | -0.1 * ‖action‖²                                                   | 1     |
    | contact     | -min(5e-7 * sum of squares of the contact forces, 10)              | 1     |

    Start: joint positions U(-0.01, 0.01) around the rest pose, velocities U(-0.01, 0.01). A control step is 0.015 s
    (five physics steps). Terminates unless the torso is 1 to 2 m high.
    """

    frame_skip = 5
    derived: tuple[str, ...] = ("xipos", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")
    derived_before: tuple[str, ...] = ("xipos",)
    reset_noise: float = 0.01
    run_weight: float = 1.25
    control_cost: float = 0.1
    contact_cost: float = 5e-7
    max_contact_cost: float = 10.0
    survive: float = 5.0
    heights: tuple[float, float] = (1.0, 2.0)

    def __init__(self, obs_style: ObsStyle = "promp", render_mode: str | None = None) -> None:
        self.obs_style = check_obs_style(self, obs_style, ("promp", "pearl", "v5"))
        super().__init__("humanoid.xml", render_mode)

    def observe(self, qpos: Array, qvel: Array) -> Array:
        return np.concatenate([qpos[:, 2:], qvel], axis=1)

    def sense(self, derived: Mapping[str, Array]) -> Sequence[Array]:
        body, dof = (1, 6) if self.obs_style == "v5" else (0, 0)
        first = {"cinert": body, "cvel": body, "qfrc_actuator": dof, "cfrc_ext": body}
        return [derived[name][:, start:] for name, start in first.items()]

    def reward_terms(self, motion: Motion, tasks: Array) -> dict[str, Array]:
        before, after = (self._mass_center(d["xipos"]) for d in (motion.derived_before, motion.derived))
        contact = self.contact_cost * squared_norm(motion.derived["cfrc_ext"])
        return {
            "run": self.run_weight * self.run_reward((after - before) / motion.dt, tasks),
            "survive": np.full(len(tasks), self.survive),
            "control": -self.control_cost * squared_norm(motion.actions),
            "contact": -np.minimum(contact, self.max_contact_cost),
        }

    def terminal(self, motion: Motion, tasks: Array) -> Array:
        height = motion.qpos[:, 2]
        return ~((height >= self.heights[0]) & (height <= self.heights[1]))

    def _mass_center(self, places: Array) -> Array:
        """Return the robot's center of mass [n, 2], given the bodies' centers of mass [n, bodies, 3]."""
        masses = self.model.body_mass
        moment = np.zeros((len(places), 2))
        # Add body by body, since NumPy's summation order may depend on the number of rows.
        for body, mass in enumerate(masses):
            moment += mass * places[:, body, :2]
        return moment / masses.sum()


class HumanoidDir(AlongX, Humanoid):
    """Walk forward or backward along x; only the reward reveals which (ProMP's HumanoidRandDirec).

    Observation, action, reward terms, start, termination: see Humanoid. Task: see OneWayOrTheOther.
    """


class HumanoidDir2D(AnyDirection, Humanoid):
    """Walk in a direction that only the reward reveals (ProMP's HumanoidRandDirec2D).

    Observation, action, reward terms, start, termination: see Humanoid. Task: see AnyDirection.
    """


class PearlHumanoidDir(PearlRobot, AnyDirection, Humanoid):
    """Walk in one of 100 directions (PEARL's humanoid-dir): HumanoidDir2D with fixed directions.

    Task: see AnyDirection and PearlRobot. Unlike in the original, changing the task does not move the robot.
    """
