"""Gradient steps per second of PPO: the fused kernel, the definition in torch, and Stable-Baselines3, in turns.

    pip install -e .[bench]
    python benchmarks/torch_updates.py [--blocks 9] [--algorithm ppo2]

An update is 10 epochs of minibatches of 64 over 2,048 steps of 17 observations and 6 actions, with two tanh layers of
64 for the policy and two for the critic, Adam and gradients of norm 0.5 at most: 320 steps of both. Metaloom's ppo
takes first the steps of the critic, then those of the policy; its ppo2 takes both at once, as Stable-Baselines3's PPO
does. Whole updates are timed, on one thread, with all that each program does around its steps; printed are medians.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import time
from collections.abc import Callable

import gymnasium
import numpy as np
import torch

from metaloom.pipeline.algorithms.actor_critic.settings import PPO, PPO2
from metaloom.pipeline.algorithms.contract import KernelName, Setup
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.types import EpisodeBatch, Step

EPISODES, LENGTH, OBSERVATIONS, ACTIONS = 8, 256, 17, 6
BATCH_SIZE, EPOCHS, LEARNING_RATE, CLIP, MAX_NORM = 64, 10, 3e-4, 0.2, 0.5
GRADIENT_STEPS = EPOCHS * EPISODES * LENGTH // BATCH_SIZE

Update = Callable[[], object]


def main() -> None:
    """Print milliseconds and gradient steps per second of each implementation, and its speed beside the last one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=9, help="updates of each implementation")
    parser.add_argument("--algorithm", choices=["ppo", "ppo2"], default="ppo2")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    updates = {name: _metaloom(arguments.algorithm, name) for name in ("fused", "torch")}
    try:
        updates["stable-baselines3"] = _stable_baselines3()
    except ImportError:
        print("stable-baselines3 is not installed (pip install -e .[bench]); comparing without it")
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for n in range(arguments.blocks + 1):
        for name, update in updates.items():
            began = time.process_time()
            update()
            if n:  # the first one touches memory and caches
                seconds[name].append(time.process_time() - began)
    medians = {name: float(np.median(values)) / GRADIENT_STEPS for name, values in seconds.items()}
    *_, last = medians
    for name, median in medians.items():
        ratio = np.median(np.array(seconds[last]) / seconds[name])
        print(
            f"{name:18} {1e3 * median:6.2f} ms of processor time per gradient step, {1 / median:6.0f} steps/s, "
            f"{ratio:5.2f} x {last}"
        )


def _metaloom(algorithm: str, kernel: KernelName) -> Update:
    shared = {
        "kernel": kernel,
        "learning_rate": LEARNING_RATE,
        "num_epochs": EPOCHS,
        "batch_size": BATCH_SIZE,
        "clip_eps": CLIP,
        "max_grad_norm": MAX_NORM,
    }
    fit = {"critic_num_epochs": EPOCHS, "critic_batch_size": BATCH_SIZE, "critic_max_grad_norm": MAX_NORM}
    settings = PPO.model_validate(shared | fit) if algorithm == "ppo" else PPO2.model_validate(shared)
    setup = Setup(
        observation_shape=(OBSERVATIONS,),
        observation_scale=1.0,
        action_size=ACTIONS,
        num_actions=0,
        env_name="benchmark",
        max_episode_steps=LENGTH,
        policy=PolicyConfig(),
        baseline=BaselineConfig(name="zero"),
        processing=ProcessingConfig(gae_lambda=0.95),
        device="cpu",
        sparse_rewards=lambda rewards: rewards,
    )
    learner = settings.build(setup)
    state, episodes = learner.initialize(run_seed=1), _episodes()
    step = Step(episodes, learner.process(state, episodes, seed=0), 0)
    return lambda: learner.update(state, [step], run_seed=1, iteration=0)


def _episodes() -> EpisodeBatch:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    mean = 0.01 * normal(1, EPISODES, LENGTH, ACTIONS)
    return EpisodeBatch(
        observations=normal(1, EPISODES, LENGTH + 1, OBSERVATIONS),
        actions=mean + normal(*mean.shape),
        rewards=normal(1, EPISODES, LENGTH),
        terminated=np.zeros((1, EPISODES), bool),
        truncated=np.ones((1, EPISODES), bool),
        lengths=np.full((1, EPISODES), LENGTH, np.int32),
        behavior={"mean": mean, "log_std": np.zeros((1, ACTIONS), np.float32)},
        reward_terms={},
        initial_state=np.zeros((1, EPISODES, 0)),
    )


class _Spaces(gymnasium.Env[np.ndarray, np.ndarray]):
    """Stands for an environment; nothing is sampled from it."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (OBSERVATIONS,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (ACTIONS,), np.float32)


def _stable_baselines3() -> Update:
    from stable_baselines3 import PPO as Reference  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.logger import Logger  # pyright: ignore[reportMissingImports]

    model = Reference(
        "MlpPolicy",
        _Spaces(),
        learning_rate=LEARNING_RATE,
        n_steps=EPISODES * LENGTH,
        batch_size=BATCH_SIZE,
        n_epochs=EPOCHS,
        clip_range=CLIP,
        max_grad_norm=MAX_NORM,
        device="cpu",
        policy_kwargs={"net_arch": [64, 64]},
    )
    model.set_logger(Logger(folder=None, output_formats=[]))
    experience, buffer = _episodes(), model.rollout_buffer
    observations = experience.observations[0, :, :-1].reshape(-1, OBSERVATIONS)
    actions = experience.actions.reshape(-1, ACTIONS)
    with torch.no_grad():
        values, log_prob, _ = model.policy.evaluate_actions(torch.tensor(observations), torch.tensor(actions))
    for n in range(len(observations)):
        reward, starts = experience.rewards.reshape(-1)[n : n + 1], np.array([n % LENGTH == 0])
        buffer.add(observations[n], actions[n], reward, starts, values[n], log_prob[n])
    buffer.compute_returns_and_advantage(last_values=values[-1], dones=np.array([True]))
    return model.train


if __name__ == "__main__":
    main()
