"""Runs of one task whose policy remembers its episode: stored and computed again as all others, episode by episode."""

import gymnasium
import numpy as np
import pytest
from memory_runs import SERIAL, recipe_config, require_forks, require_replayed, trained_once

import metaloom
from metaloom import storage
from metaloom.flows.commands.optimize import optimize
from metaloom.flows.commands.train import resume, train
from metaloom.flows.errors import UsageError
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.trained.blueprint import Blueprint
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.wrappers import observe_places
from metaloom.pipeline.policies.remembering import Remembering, recollect
from metaloom.pipeline.types import TaskParams

pytestmark = pytest.mark.usefixtures("warm")

SMALL = ("policy.hidden_sizes=[8]", "iterations=2", "episodes_per_task=5", "max_episode_steps=12")
EVALUATED = ("evaluation.every=2", "evaluation.test_episodes=3")
RUNS = {
    "ppo": ("recurrent-ppo-cartpole",),
    "a2c": ("recurrent-a2c-cartpole", "policy.network=lstm"),
    "continuous": ("recurrent-ppo", "env=Pendulum-v1", "env.observed=[0, 1]"),
}


def config_of(name, *changes):
    recipe, *settings = RUNS[name]
    return recipe_config(recipe, [*SMALL, *settings, *changes])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Small runs by name, trained once in this process."""
    return trained_once(tmp_path_factory, lambda name: config_of(name, *EVALUATED))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_learns_and_replays_bit_for_bit(made, name):
    run = storage.open_run(made(name))
    start, end = run[0].learner(), run[1].update().learner
    assert all(not np.array_equal(start.params[p], end.params[p]) for p in start.params)
    assert not np.array_equal(start.extra["critic.output.kernel"], end.extra["critic.output.kernel"])
    require_replayed(made(name))


def test_two_workers_give_the_digests_of_this_process(made, tmp_path, digests):
    train(config_of("ppo", *EVALUATED), tmp_path / "run", backend=Backend(workers=2))
    assert digests(tmp_path / "run") == digests(made("ppo"))


def test_a_resumed_run_is_one_that_was_never_interrupted(made, tmp_path, digests):
    train(config_of("a2c", *EVALUATED, "iterations=1"), tmp_path / "run", backend=SERIAL)
    resume(tmp_path / "run", iterations=2, backend=SERIAL)
    assert digests(tmp_path / "run") == digests(made("a2c"))


def test_a_fork_goes_on_as_its_parent_did_unless_a_setting_changes(made, tmp_path, digests):
    require_forks(made("ppo"), tmp_path, "algorithm.clip_eps=0.01", digests)


def test_stored_episodes_are_learned_from_again_under_other_settings(made):
    result = optimize(made("ppo"), 1, ["algorithm.learning_rate=0.01"])
    assert result.stored.identical
    assert not result.changed.identical


@pytest.mark.parametrize("name", RUNS)
def test_hidden_states_begin_at_zero_in_every_episode_and_come_again_bit_for_bit(made, name):
    run = metaloom.open_run(made(name))
    config, batch, state = config_of(name), run[1].rollouts(0), run[1].learner()
    spaces, E = run.policy(1).blueprint.spaces, batch.rewards.shape[1]
    remembering = Remembering(config.policy, spaces, TaskParams.broadcast(state.params, 1), num_rows=E)
    outputs = recollect(remembering, batch.observations, batch.actions, batch.rewards, batch.lengths)
    mask = batch.mask != 0
    if "mean" in batch.behavior:
        assert np.array_equal(outputs[mask], batch.behavior["mean"][mask])
    else:
        log_probs = outputs - np.log(np.exp(outputs.astype(np.float64)).sum(-1, keepdims=True))
        np.testing.assert_allclose(batch.behavior["log_probs"][mask], log_probs[mask], atol=1e-5)
        assert np.array_equal(outputs[mask].argmax(-1), batch.behavior["log_probs"][mask].argmax(-1))


def test_reset_drops_what_a_policy_remembers_as_every_stored_episode_begins_anew(made):
    run = metaloom.open_run(made("continuous"))
    batch, policy = run[1].rollouts(0), run.policy(1)
    assert policy.blueprint.spaces.observation_shape == (2,)
    for e in range(3):
        policy.reset()
        first, mean = batch.observations[0, e, 0], batch.behavior["mean"][0, e, 0]
        np.testing.assert_allclose(policy.act(first), mean, atol=1e-6)
        policy.observe(float(batch.rewards[0, e, 0]), False)
        assert not np.allclose(policy.act(first), mean, atol=1e-6)
    with pytest.raises(UsageError, match="does not adapt"):
        policy.adapt(batch)


def test_an_environment_is_taken_with_all_it_shows_or_with_the_observed_places_alone():
    blueprint = Blueprint.of(recipe_config("recurrent-ppo", ["env=Pendulum-v1", "env.observed=[0, 2]"]))
    env = gymnasium.make("Pendulum-v1")
    shown, _ = env.reset(seed=1)
    for taken in (env, observe_places(env, (0, 2))):
        np.testing.assert_array_equal(blueprint.wrap(taken).reset(seed=1)[0], shown[[0, 2]])


def test_an_episode_that_ended_is_forgotten_and_those_of_other_rows_are_not(made):
    policy = metaloom.open_run(made("continuous")).policy()
    seen = np.array([[0.1, 0.2], [0.3, -0.4]])
    first = policy.act(seen)
    policy.observe(np.array([1.0, 2.0]), np.array([True, False]))
    second = policy.act(seen)
    assert np.array_equal(second[0], first[0])
    assert not np.array_equal(second[1], first[1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("algorithm.episodes_per_trial=2", "episodes_per_trial"),
        (
            "policy.network=mlp",
            "use gru, lstm, linear-attention, or module:Class of a network with memory for recurrent-ppo",
        ),
        ("baseline=linear_feature", "recurrent-ppo learns its own values"),
        ("evaluation.adaptation_steps=1", "recurrent-ppo does not adapt"),
        ("env.observed=[0, 0]", r"got \[0, 0\]; each index may appear only once"),
        ("env.observed=[]", "env.observed"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_reason(change, reason):
    with pytest.raises(ConfigError, match=reason):
        config_of("ppo", change)


@pytest.mark.parametrize(
    ("env", "observed", "reason"),
    [
        ("CartPole-v1", "[0, 4]", r"env\.observed is \[0, 4\], but the observation space of CartPoleEnv"),
        ("FrozenLake-v1", "[16]", "use valid indices of a one-dimensional Box"),  # the one-hot vector of its 16 states
        ("half-cheetah-dir", "[0]", "is a MetaEnv; the setting is for plain gymnasium environments"),
    ],
)
def test_places_that_an_environment_does_not_show_are_refused(tmp_path, env, observed, reason):
    config = config_of("ppo", f"env={env}", f"env.observed={observed}", "env.action_scale=null")
    with pytest.raises(EnvError, match=reason):
        train(config, tmp_path / "run", backend=SERIAL)
    assert not (tmp_path / "run").exists()
