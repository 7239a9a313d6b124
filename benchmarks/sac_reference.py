"""Stable-Baselines3's SAC with the settings that `benchmarks/sac.py` compares under, and a clock around its updates."""
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from sac_settings import (
    BATCH_SIZE,
    DISCOUNT,
    FIRST_TEMPERATURE,
    HIDDEN_SIZES,
    LEARNING_RATE,
    MEMORY_SIZE,
    OLD_TARGET_WEIGHT,
    RANDOM_STEPS,
)
from stable_baselines3 import SAC  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.monitor import Monitor  # pyright: ignore[reportMissingImports]

EVALUATION_SEEDS = 1_000
"""Between the first test episodes of two seeds: like Metaloom's, each seed's start in states of their own."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Tests:
    """So many deterministic episodes after every `every`-th update."""

    every: int
    episodes: int


@dataclass
class Progress:
    """Experience of a run so far.

    Attributes:
        lengths, returns: of every episode of training, the random ones included.
        evaluations: environment steps, gradient steps and the returns of deterministic episodes, or their mean.
        gradient_steps: so far; `update_seconds` of the clock and `update_cpu_seconds` of the processor went into them.
    """

    lengths: list[int] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    gradient_steps: int = 0
    update_seconds: float = 0.0
    update_cpu_seconds: float = 0.0


class TimedSAC(SAC):
    """SAC that times its updates and calls `after_update` when one has ended, with itself."""

    progress: Progress
    after_update: Callable[["TimedSAC"], None]

    def train(self, gradient_steps: int, batch_size: int = BATCH_SIZE) -> None:
        """Make gradient steps, as many as the last episode had environment steps."""
        began, cpu = time.perf_counter(), time.process_time()
        super().train(gradient_steps, batch_size)
        self.progress.update_seconds += time.perf_counter() - began
        self.progress.update_cpu_seconds += time.process_time() - cpu
        self.progress.gradient_steps += gradient_steps
        self.after_update(self)

    def prepare_to_train(self) -> None:
        """Do what `learn` does before the first update, for callers that fill the memory themselves."""
        self._setup_learn(total_timesteps=1)


def reference_model(env: gymnasium.Env[Any, Any], seed: int) -> TimedSAC:
    """An untrained model: after each whole episode as many gradient steps as it had environment steps."""
    model = TimedSAC(
        "MlpPolicy",
        env,
        learning_rate=LEARNING_RATE,
        buffer_size=MEMORY_SIZE,
        learning_starts=RANDOM_STEPS,
        batch_size=BATCH_SIZE,
        tau=1 - OLD_TARGET_WEIGHT,
        gamma=DISCOUNT,
        train_freq=(1, "episode"),
        gradient_steps=-1,
        ent_coef=f"auto_{FIRST_TEMPERATURE}",
        policy_kwargs={"net_arch": list(HIDDEN_SIZES)},
        seed=seed,
        device="cpu",
    )
    model.progress = Progress()
    model.after_update = lambda trained: None
    return model


def train_reference(env: str, steps: int, seed: int, tests: Tests, report: Callable[[Progress], None]) -> Progress:
    """Train for so many environment steps; `report` is told what there is after every test."""
    monitor = Monitor(gymnasium.make(env))
    model = reference_model(monitor, seed)
    updates = 0

    def after_update(trained: TimedSAC) -> None:
        nonlocal updates
        updates += 1
        progress = trained.progress
        progress.lengths, progress.returns = monitor.get_episode_lengths(), monitor.get_episode_rewards()
        if updates % tests.every == 0:
            returns = _evaluate(trained, env, seed, tests.episodes)
            progress.evaluations.append(
                {"steps": sum(progress.lengths), "gradient_steps": progress.gradient_steps, "returns": returns}
            )
            report(progress)

    model.after_update = after_update
    model.learn(steps)
    return model.progress


def _evaluate(model: SAC, env: str, seed: int, episodes: int) -> list[float]:
    """Returns of deterministic episodes, every time from the same initial states."""
    test_env = gymnasium.make(env)
    returns = []
    for episode in range(episodes):
        observation, _ = test_env.reset(seed=EVALUATION_SEEDS * seed + episode)
        rewards, ended = [], False
        while not ended:
            action, _ = model.predict(observation, deterministic=True)
            observation, reward, terminated, truncated, _ = test_env.step(np.asarray(action))
            rewards.append(float(reward))
            ended = terminated or truncated
        returns.append(sum(rewards))
    return returns
