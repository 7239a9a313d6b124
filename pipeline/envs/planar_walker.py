"""Base of walker2d and hopper: robots that walk in a plane, can fall, and are paid for staying up."""

from abc import abstractmethod

import numpy as np

from metaloom.pipeline.envs.mujoco_robot import Motion, squared_norm
from metaloom.pipeline.types import Array


class PlanarWalker:
    """Rules that go before MujocoRobot.

    Joint 0 is the distance forward, 1 the height, 2 the angle of the trunk; observations omit the distance.

    Reward terms: `run`, what the subclass makes of the mean forward velocity of the step; `alive`, a constant, paid
    for the step that ends an episode as well; `control` = -0.001 ‖action‖².
    """

    reset_noise: float = 0.005
    control_cost: float = 1e-3
    alive_bonus: float = 1.0
    max_observed_velocity: float = 10.0

    def observe(self, qpos: Array, qvel: Array) -> Array:
        limit = self.max_observed_velocity
        observations = np.empty((len(qpos), qpos.shape[1] + qvel.shape[1] - 1))
        observations[:, : qpos.shape[1] - 1] = qpos[:, 1:]
        np.clip(qvel, -limit, limit, out=observations[:, qpos.shape[1] - 1 :])
        return observations

    def reward_terms(self, motion: Motion, tasks: Array) -> dict[str, Array]:
        velocity = (motion.qpos[:, 0] - motion.qpos_before[:, 0]) / motion.dt
        return {
            "run": self.run_reward(velocity, tasks),
            "alive": np.full(len(velocity), self.alive_bonus),
            "control": -self.control_cost * squared_norm(motion.actions),
        }

    @abstractmethod
    def run_reward(self, velocity: Array, tasks: Array) -> Array:
        """Return the reward of a forward velocity [n] in m/s, [n]."""

    def terminal(self, motion: Motion, tasks: Array) -> Array:
        return ~self.healthy(motion.qpos, motion.qvel)

    @abstractmethod
    def healthy(self, qpos: Array, qvel: Array) -> Array:
        """Return True where the robot is up, [n]; False where a value is not finite."""
