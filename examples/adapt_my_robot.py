"""Train a policy that adapts, then adapt it to a robot that training never saw: yours.

python examples/adapt_my_robot.py
"""

import tempfile
from pathlib import Path

import gymnasium
import numpy as np

import metaloom


class MyRobot(gymnasium.Env):
    """A point on a slippery floor that is paid for coming near a goal it cannot see. Plain gymnasium."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Box(-0.2, 0.2, (2,), np.float32)
    goal = np.array([1.6, -1.8])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = np.zeros(2)
        return self.position.copy(), {}

    def step(self, action):
        self.position += action + 0.01 * self.np_random.standard_normal(2)
        return self.position.copy(), -float(np.linalg.norm(self.position - self.goal)), False, False, {}


def mean_return(policy, env, episodes=10, steps=50):
    """Mean return of the policy's most likely actions."""
    returns = np.zeros(episodes)
    for episode in range(episodes):
        observation, _ = env.reset(seed=episode)
        policy.reset()
        for _ in range(steps):
            observation, reward, *_ = env.step(policy(observation))
            returns[episode] += reward
    return returns.mean()


def main(folder: Path, iterations: int = 20) -> None:
    """Train, adapt, compare."""
    small = {"iterations": iterations, "num_tasks": 20, "max_episode_steps": 50}
    run = metaloom.train("promp-point-corner", folder / "run", env={"options": {"reward": "dense"}}, **small)
    env, policy = MyRobot(), run.policy()
    mine = policy.adapt(env, episodes=20)
    print(f"{mean_return(policy, env):.1f} before, {mean_return(mine, env):.1f} after adaptation to 20 episodes")
    mine.save(folder / "mine.safetensors")
    assert np.array_equal(metaloom.load_policy(folder / "mine.safetensors")(np.ones(2)), mine(np.ones(2)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
