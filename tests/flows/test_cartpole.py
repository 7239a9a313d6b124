"""The actor-critics solve CartPole-v1: 475 is what gymnasium calls solved."""

import pytest

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.runs import best_iteration
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config

HERE = Backend(workers=0)


@pytest.mark.learning
@pytest.mark.parametrize("recipe", ["a2c", "ppo", "ppo2"])
def test_the_best_policy_of_a_run_reaches_475_in_20_test_episodes(tmp_path, recipe):
    # Ten whole episodes per iteration, and an end once all ten are perfect: the best of fewer may be so by chance.
    changes = ["env=CartPole-v1", "iterations=100", "min_steps=5000", "stop.return_threshold=500"]
    train(build_config(override(load_settings(recipe), changes)), tmp_path / "run", backend=HERE)
    run = storage.open_run(tmp_path / "run")
    for deterministic in (False, True):
        judged = evaluate(
            tmp_path / "run", best_iteration(run), num_tasks=1, test_episodes=20, deterministic=deterministic
        )
        returns = judged.evaluation.test_returns
        assert returns.shape == (1, 1, 20)
        assert returns.mean() >= 475, (deterministic, returns)


@pytest.mark.learning
def test_every_particle_of_svpg_balances_the_pole(tmp_path):
    """With seeds 1 to 3, all four particles do so in every iteration from 16 on."""
    changes = ["env=CartPole-v1", "algorithm.particle=ppo", "iterations=40"]
    train(build_config(override(load_settings("svpg"), changes)), tmp_path / "run", backend=HERE)
    episodes = storage.open_run(tmp_path / "run").episodes(range(30, 40)).to_pandas()
    assert (episodes.groupby("task")["return"].mean() >= 475).all()
