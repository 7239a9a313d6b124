"""Runs of the meta family on discrete actions: they replay, resume, are optimized, and their policies act elsewhere."""

import numpy as np
import pytest
from small_envs import Noting
from small_runs import GRADIENT_BASED

import metaloom
from metaloom.flows.commands.doctor import check_environment, env_config
from metaloom.flows.commands.optimize import optimize
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import resume, train
from metaloom.flows.recipes import new_config
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.envs.contract import EnvError

pytestmark = pytest.mark.usefixtures("warm")

SERIAL = Backend(workers=0)


@pytest.fixture(scope="module")
def config(tiny_config):
    def made(name, **changes):
        algorithm = {"name": name, "inner_lr": 1.0, "outer_lr": 0.05}
        if name in ("maml-trpo", "e-maml"):
            del algorithm["outer_lr"]
        env = {"name": "small_envs:Bells", "action_scale": None}
        baselines = {"processing": {"return_baseline": "zero"}} if name == "vpg-dice" else {}
        return tiny_config(env=env, algorithm=algorithm, **{"iterations": 2, **baselines, **changes})

    return made


@pytest.fixture(scope="module", params=GRADIENT_BASED)
def trained(request, tmp_path_factory, config):
    path = tmp_path_factory.mktemp("discrete") / "run"
    train(config(request.param), path, backend=SERIAL)
    return metaloom.open_run(path)


def test_a_run_resumes_and_replays_to_the_same_bits_on_any_number_of_threads(trained, tmp_path, config, digests):
    name = trained.config["algorithm"]["name"]
    assert all(outcome.identical for outcome in replay(trained.path))
    train(config(name, iterations=1), tmp_path / "parts", backend=Backend(workers=0, threads=2))
    resume(tmp_path / "parts", iterations=2, backend=SERIAL)
    assert digests(tmp_path / "parts") == digests(trained.path)
    episodes = trained[0].rollouts(1)
    assert episodes.actions.dtype == np.int64
    np.testing.assert_allclose(np.exp(episodes.behavior["log_probs"]).sum(-1), 1, rtol=1e-5)
    assert "policy_std" not in "".join(trained[1].metrics())


def test_a_stage_is_computed_again_under_other_settings(trained):
    same = optimize(trained.path, 1, [])
    assert same.changed.identical
    assert optimize(trained.path, 1, ["algorithm.inner_lr=0.5"]).distance()["distance"] > 0


def test_every_task_acts_by_its_own_adapted_probabilities(trained):
    before, after = (trained[1].rollouts(k).behavior["log_probs"] for k in (0, 1))
    np.testing.assert_array_equal(before[0, 0, 0], before[1, 0, 0])  # nothing is seen yet
    tasks = trained[1].tasks().params[:, 0]
    other = next(b for b in range(1, len(tasks)) if tasks[b] != tasks[0])
    assert (after[0, 0, 0] != after[other, 0, 0]).any()


def test_a_trained_policy_adapts_and_acts(trained):
    policy = trained.policy()
    adapted = policy.adapt(trained[1].rollouts(0))
    seen = np.eye(4, dtype=np.float32)
    assert adapted.task(0)(seen).dtype == np.int64
    chances = np.exp([policy.log_prob(seen, np.full(4, action)) for action in range(4)])
    np.testing.assert_allclose(chances.sum(0), 1, rtol=1e-5)


def test_promp_learns_which_bell_to_ring(tmp_path, config):
    """From a policy that knows no bell, one step makes it ring the right one; ten points above chance, which is 2.5."""
    path = tmp_path / "run"
    train(config("promp", iterations=15, num_tasks=8, episodes_per_task=10), path, backend=SERIAL)
    metrics = metaloom.open_run(path).metrics().to_pandas()
    assert metrics["step_0.average_return"].iloc[-3:].mean() < 4
    assert metrics["step_1.average_return"].iloc[-3:].mean() > 5


@pytest.mark.dask
@pytest.mark.slow
def test_workers_give_the_same_bits(tmp_path, config, digests):
    train(config("promp", iterations=1), tmp_path / "here", backend=SERIAL)
    train(config("promp", iterations=1), tmp_path / "there", backend=Backend(workers=1))
    assert digests(tmp_path / "there") == digests(tmp_path / "here")


def test_actions_that_nobody_scales_are_those_of_the_recipe_without_a_scale(tmp_path):
    small = ["iterations=1", "num_tasks=2", "episodes_per_task=2", "max_episode_steps=3", "policy.hidden_sizes=[4]"]
    train(new_config("promp", ["env=small_envs:Bells", *small]), tmp_path / "run", backend=SERIAL)
    assert metaloom.open_run(tmp_path / "run").config["env"]["action_scale"] is None
    with pytest.raises(EnvError, match=r"is 10, .*Discrete\(4\) are discrete .*--set env.action_scale=null"):
        train(new_config("promp", ["env=small_envs:Bells", "env.action_scale=10"]), tmp_path / "no", backend=SERIAL)


@pytest.mark.parametrize("name", ["bernoulli-bandit", "hidden-goal-grid", "small_envs:Bells", "CartPole-v1"])
def test_doctor_takes_discrete_actions(name):
    assert {check.status for check in check_environment(env_config(name))} == {"ok"}


def test_doctor_takes_every_discrete_action():
    check_environment(env_config("small_envs:Noting"))
    assert Noting.taken == {0, 1, 2, 3}
