"""Sparse rewards made of stored dense ones, as PEARL's context and evaluation need them."""

import numpy as np
import pytest

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import EnvError, MetaEnv
from metaloom.pipeline.envs.registry import make_batch_env, make_env

NAME = "pearl-sparse-point-robot"


def env(reward: str = "dense") -> MetaEnv:
    return make_env(EnvConfig(name=NAME, action_scale=1.0, options={"reward": reward}))


def rewards_of(reward: str) -> np.ndarray:
    """[T, N] float32 of the same seeds and actions, with goals near enough to be met."""
    batch = make_batch_env(EnvConfig(name=NAME, action_scale=1.0, options={"reward": reward}), 50)
    rng = np.random.default_rng(0)
    batch.reset(rng.uniform(-0.4, 0.4, (50, 2)), np.arange(50, dtype=np.uint64))
    steps = [batch.step(rng.uniform(-1, 1, (50, 2)).astype(np.float32), np.arange(50)) for _ in range(60)]
    return np.array([sum(step.reward_terms.values()) for step in steps], np.float32)


def test_dense_rewards_become_those_of_the_sparse_environment() -> None:
    dense, sparse = rewards_of("dense"), rewards_of("sparse")
    made = env().sparse_rewards(dense)
    assert made.dtype == np.float32
    assert np.array_equal(made > 0, sparse > 0)
    assert 100 < (sparse > 0).sum() < 2900
    np.testing.assert_allclose(made, sparse, rtol=0, atol=2**-23)  # one step of float32 below 1


def test_in_the_environments_own_precision_they_are_equal() -> None:
    robots = [env("dense"), env("sparse")]
    for robot in robots:
        robot.set_task(np.array([0.1, 0.1]))
        robot.reset(seed=0)
    for action in np.random.default_rng(0).uniform(-1, 1, (100, 2)):
        dense, sparse = (robot.step(action)[1] for robot in robots)
        assert robots[0].sparse_rewards(np.array(dense)) == sparse


def test_the_goal_is_met_within_and_on_the_radius_only() -> None:
    rewards = np.array([0.0, -0.1, -0.2, -0.21, -1.5], np.float32)
    np.testing.assert_allclose(env().sparse_rewards(rewards), [1.0, 0.9, 0.8, 0.0, 0.0], rtol=1e-6)


def test_sparse_rewards_stay_what_they_are() -> None:
    rewards = np.array([0.0, 0.8, 1.0], np.float32)
    assert np.array_equal(env("sparse").sparse_rewards(rewards), rewards)


@pytest.mark.parametrize("config", [{"name": "pearl-point-robot"}, {"name": "Pendulum-v1"}], ids=lambda c: c["name"])
def test_an_environment_without_them_says_so(config: dict[str, str]) -> None:
    with pytest.raises(EnvError, match=r"P\w+ has no sparse rewards; use .*pearl-sparse-point-robot"):
        make_env(EnvConfig(**config)).sparse_rewards(np.zeros(3, np.float32))
