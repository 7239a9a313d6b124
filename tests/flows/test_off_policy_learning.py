"""DQL solves CartPole-v1, SAC swings the pendulum up, and PEARL's policies do better once they know their task."""

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config

HERE = Backend(workers=0)
SMALL_PEARL = [
    "policy.hidden_sizes=[128,128,128]",
    "algorithm.critic_hidden_sizes=[128,128,128]",
    "algorithm.encoder_hidden_sizes=[128,128,128]",
    "algorithm.batch_size=64",
    "iterations=10",
    "evaluation.every=10",
    "evaluation.adaptation_steps=1",
    "evaluation.episodes=10",
]


def trained(path, recipe, *changes):
    train(build_config(override(load_settings(recipe), changes)), path, backend=HERE)
    return storage.open_run(path)


@pytest.mark.learning
@pytest.mark.timeout(0)
def test_dql_reaches_475_on_cartpole(tmp_path):
    run = trained(tmp_path / "run", "dql")
    judged = {ref.iteration: run[ref.iteration].evaluation() for ref in run.refs() if ref.stage == "evaluate"}
    best = max(judged, key=lambda i: judged[i].test_returns.mean())
    # By other episodes than those that chose it.
    again = evaluate(tmp_path / "run", best + 1, test_episodes=100, seed=1, backend=HERE)
    assert again.evaluation.test_returns.mean() >= 475


@pytest.mark.learning
@pytest.mark.timeout(0)
def test_sac_reaches_minus_200_on_the_pendulum(tmp_path):
    trained(tmp_path / "run", "sac-pendulum", "iterations=40")
    again = evaluate(tmp_path / "run", test_episodes=100, seed=1, backend=HERE)
    assert again.evaluation.test_returns.mean() > -200


@pytest.mark.learning
@pytest.mark.timeout(0)
def test_pearls_policy_does_better_on_test_tasks_once_they_are_inferred(tmp_path):
    run = trained(tmp_path / "run", "pearl-point-robot", *SMALL_PEARL)
    returns = run[9].evaluation().test_returns.mean(axis=2)
    gained = returns[:, 1] - returns[:, 0]
    assert gained.mean() > 3 * gained.std(ddof=1) / np.sqrt(len(gained)), returns
