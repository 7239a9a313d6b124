"""However an environment is reset by itself after an episode, the stored episodes are the same."""

import sys
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import Autoreset

from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import BatchStep
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.envs.wrappers import SingleTask
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.estimation.processing import process_samples
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.tasks.samplers import draw_tasks
from metaloom.pipeline.types import EpisodeBatch, TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition, Sampler, play_episodes


class Walk(gymnasium.Env):
    """Ends at a place, or at its own time limit of 6 steps; a new episode would start elsewhere."""

    observation_space = Box(-100, 100, (2,), np.float64)
    action_space = Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.t, self.place = 0, self.np_random.uniform(10, 20)
        return np.array([self.place, 0.0]), {}

    def step(self, action: np.ndarray):
        self.t += 1
        self.place += 1 + float(action[0])
        return np.array([self.place, self.t]), -self.place, self.place > 21, self.t == 6, {}


class VectorRows:
    """A gymnasium vector environment as a BatchEnv: what it does to rows whose episode ended is never looked at."""

    def __init__(self, vector: SyncVectorEnv, num_rows: int) -> None:
        self.vector, self.num_rows = vector, num_rows
        self.observation_size, self.action_size = 2, 1

    def reset(self, tasks: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        return self.vector.reset(seed=seeds.tolist())[0].copy()

    def step(self, actions: np.ndarray, rows: np.ndarray) -> BatchStep:
        everywhere = np.zeros((self.num_rows, 1), np.float32)
        everywhere[rows] = actions
        observations, rewards, terminated, truncated, infos = self.vector.step(everywhere)
        observations = observations.copy()
        for row in np.flatnonzero(infos.get("_final_obs", [])):  # SAME_STEP hides the last one here
            observations[row] = infos["final_obs"][row]
        ended = terminated | truncated
        if self.vector.metadata["autoreset_mode"] is AutoresetMode.DISABLED and ended.any():
            # It refuses to step what has ended, and here everything is stepped.
            self.vector.reset(options={"reset_mask": ended})
        return BatchStep(observations[rows], {"reward": rewards[rows]}, terminated[rows], truncated[rows])

    @property
    def state(self) -> np.ndarray:
        return np.zeros((self.num_rows, 0))

    def close(self) -> None:
        self.vector.close()


class Vectorized(SingleTask):
    def __init__(self, mode: str) -> None:
        super().__init__(Walk())
        self.mode = AutoresetMode[mode]

    def batch(self, num_rows: int, num_threads: int) -> VectorRows:
        return VectorRows(SyncVectorEnv([Walk] * num_rows, autoreset_mode=self.mode), num_rows)


class Wrapped(Autoreset):
    def __init__(self) -> None:
        super().__init__(Walk())


@pytest.fixture(autouse=True)
def own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("autoreset_envs")
    module.__dict__.update(Walk=Walk, Vectorized=Vectorized, Wrapped=Wrapped)
    monkeypatch.setitem(sys.modules, "autoreset_envs", module)


def rollout(name: str, **options: str) -> EpisodeBatch:
    config = EnvConfig(name=f"autoreset_envs:{name}", options=dict(options))
    policy = PolicyConfig(hidden_sizes=(4,))
    sampler = Sampler(config, policy, episodes_per_task=8, max_episode_steps=5)
    tasks = draw_tasks(make_env(config), num_tasks=2, run_seed=1, iteration=0)
    rng = np.random.default_rng(0)
    shapes = {"hidden_0.kernel": (2, 4), "hidden_0.bias": (4,), "output.kernel": (4, 1), "output.bias": (1,)}
    params = {f"mean_network.{n}": rng.normal(size=(2, *s)).astype(np.float32) for n, s in shapes.items()}
    params["log_std"] = np.ones((2, 1), np.float32)
    return play_episodes(sampler, TaskParams(params), tasks, position=RolloutPosition(1, 0, 0))


# Also one step longer than the sampler's limit, and a wrapper that resets a single environment at its next step.
@pytest.mark.parametrize(
    ("name", "options"),
    [("Vectorized", {"mode": mode.name}) for mode in AutoresetMode] + [("Wrapped", {})],
    ids=[*AutoresetMode.__members__, "wrapper"],
)
def test_every_autoreset_mode_gives_the_lengths_last_observations_and_advantages_of_none(name, options):
    expected, found = rollout("Walk"), rollout(name, **options)
    assert len(np.unique(expected.lengths)) > 2
    assert expected.terminated.any()
    assert expected.truncated.any()
    for array in ("lengths", "terminated", "truncated", "observations", "actions", "rewards"):
        assert np.array_equal(getattr(found, array), getattr(expected, array)), array
    # Beyond its end an episode must be empty, and at its end lies the observation that a value is bootstrapped from.
    b, e = np.argwhere(expected.terminated)[0]
    assert found.observations[b, e, found.lengths[b, e], 0] > 21
    baseline, processing = BaselineConfig().build(), ProcessingConfig()
    samples = [process_samples(episodes, baseline, processing, seed=0) for episodes in (expected, found)]
    assert np.array_equal(samples[0].advantages, samples[1].advantages)
