"""A memory makes up for velocities that are not observed."""

import pytest

import metaloom
from metaloom.flows.rollouts.workers import Backend

SERIAL = Backend(workers=0)
POLE = {"env": {"name": "CartPole-v1", "observed": [0, 2]}, "max_episode_steps": 200}
AS_MANY = {
    "min_steps": None,
    "episodes_per_task": 32,
    "iterations": 40,
    "processing": {"discount": 0.99, "gae_lambda": 0.95},
}


def last_returns(recipe, path, seed, episodes, **changes):
    """Mean return of the last so many episodes."""
    run = metaloom.train(recipe, path, progress=False, seed=seed, backend=SERIAL, **changes)
    return run.episodes().to_pandas()["return"].tail(episodes).mean()


@pytest.mark.learning
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_pole_without_velocities_is_balanced_with_a_memory_and_not_without(tmp_path, seed):
    without = last_returns("ppo", tmp_path / "without", seed, 320, **POLE, **AS_MANY)
    by_ppo = last_returns("recurrent-ppo-cartpole", tmp_path / "ppo", seed, 320)
    by_a2c = last_returns("recurrent-a2c-cartpole", tmp_path / "a2c", seed, 320)
    assert without < 80
    assert by_ppo > 150
    assert by_a2c > 100
