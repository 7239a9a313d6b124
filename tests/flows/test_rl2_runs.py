"""Runs that adapt by memory: stored, resumed, forked and computed again as all others, and trials on any worker."""

import copy
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from memory_runs import SERIAL, recipe_config, require_forks, require_replayed, trained_once

import metaloom
from metaloom import storage
from metaloom.flows.commands.train import resume, train
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import number, trial_returns
from metaloom.flows.observer import IterationReport
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.recipes import RECIPES, new_config
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.viewer.outputs import adaptation_page, returns_by_task
from metaloom.flows.views.history import load_history
from metaloom.flows.views.progress import returns_text
from metaloom.flows.views.run_charts import run_charts
from metaloom.flows.views.tables import recipe_rows
from metaloom.pipeline.arithmetic import numpy_facts
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.policies.remembering import Remembering, recollect
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import TaskParams

pytestmark = pytest.mark.usefixtures("warm")

SMALL = ("policy.hidden_sizes=[8]", "iterations=2", "num_tasks=3", "episodes_per_task=4", "max_episode_steps=6")
EVALUATED = ("evaluation.every=2", "evaluation.num_tasks=2", "evaluation.test_episodes=3")
RUNS = {
    "bandit": ("rl2-bandit", "algorithm.episodes_per_trial=2"),
    "robot": ("rl2-navigation-2d",),
    "lstm": ("rl2-navigation-2d", "policy.network=lstm"),
    "attention": ("rl2-tabular-mdp", "algorithm.episodes_per_trial=2"),
    "asinh": ("rl2-navigation-2d", "policy.network=linear-attention", "policy.network_options.reading=asinh"),
    "trust region": ("rl2-trpo", "env=navigation-2d"),
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


@pytest.mark.parametrize(
    "name", ["bandit", "robot", "attention", "asinh", pytest.param("trust region", marks=pytest.mark.sweep)]
)
def test_one_and_two_workers_give_the_digests_of_this_process(made, name, tmp_path, digests):
    train(config_of(name, *EVALUATED), tmp_path / "run", backend=Backend(workers=2))
    assert digests(tmp_path / "run") == digests(made(name))


@pytest.mark.skipif("X86_V4" not in numpy_facts().split(), reason="this processor has no AVX-512")
def test_numpy_s_code_for_other_processors_is_named_where_asinh_rounds_otherwise(made):
    command = [sys.executable, "-m", "metaloom.flows.cli", "replay", "--json", f"{made('asinh')}@0"]
    told = {**os.environ, "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR"}
    done = subprocess.run([*command, "--workers", "0"], env=told, capture_output=True, text=True, check=False)
    different = [outcome for outcome in json.loads(done.stdout) if not outcome["identical"]]
    assert different[0]["stage"] == "collect_rollouts", done.stderr
    changed = f"arithmetic of numpy: {numpy_facts()} then, X86_V3 now"
    assert all(outcome["changed"] == [changed] for outcome in different)


def test_one_worker_gives_the_digests_of_this_process(made, tmp_path, digests):
    train(config_of("bandit", *EVALUATED), tmp_path / "run", backend=Backend(workers=1))
    assert digests(tmp_path / "run") == digests(made("bandit"))


def test_a_resumed_run_is_one_that_was_never_interrupted(made, tmp_path, digests):
    train(config_of("robot", *EVALUATED, "iterations=1"), tmp_path / "run", backend=SERIAL)
    resume(tmp_path / "run", iterations=2, backend=SERIAL)
    assert digests(tmp_path / "run") == digests(made("robot"))


def test_a_fork_goes_on_as_its_parent_did_unless_a_setting_changes(made, tmp_path, digests):
    require_forks(made("robot"), tmp_path, "algorithm.clip_eps=0.01", digests)


def test_hidden_states_of_a_stored_run_come_again_bit_for_bit(made):
    run = metaloom.open_run(made("robot"))
    config, batch, state = config_of("robot"), run[1].rollouts(0), run[1].learner()
    spaces = run.policy(1).blueprint.spaces
    remembering = Remembering(config.policy, spaces, TaskParams.broadcast(state.params, 3), num_rows=2)
    for episodes in (slice(0, 2), slice(2, 4)):  # the first ones of the two trials of a task, then the second ones
        parts = (batch.observations, batch.actions, batch.rewards, batch.lengths)
        outputs = recollect(remembering, *(part[:, episodes] for part in parts))
        mask = batch.mask[:, episodes] != 0
        assert np.array_equal(outputs[mask], batch.behavior["mean"][:, episodes][mask])


def test_a_fork_of_a_trust_region_under_another_bound_takes_another_step(made, tmp_path, digests):
    require_forks(made("trust region"), tmp_path, "algorithm.max_kl=0.0001", digests)


def test_trials_of_a_longer_kind_begin_as_shorter_ones_do(made, tmp_path):
    longer = ("algorithm.episodes_per_trial=3", "episodes_per_task=6", "iterations=1")
    train(config_of("robot", *longer), tmp_path / "run", backend=SERIAL)
    short, long = (storage.open_run(path)[0].rollouts(0) for path in (made("robot"), tmp_path / "run"))
    assert long.rewards.shape[1] == 6
    for name in ("observations", "actions", "rewards"):
        assert np.array_equal(getattr(long, name)[:, :4], getattr(short, name))


def test_an_evaluation_has_a_return_for_every_number_of_episodes_remembered(made):
    stored = storage.open_run(made("robot"))[1].evaluation()
    assert stored.test_returns.shape == (2, 2, 3)
    assert stored.adaptation_returns.shape == (2, 1, 1)
    outcome = evaluate(made("robot"), adaptation_steps=3, backend=SERIAL)
    assert [row.adaptation_steps for row in outcome.summary()] == [0, 1, 2, 3]
    assert np.array_equal(outcome.evaluation.test_returns[:, :2], stored.test_returns)


def test_adapted_to_the_first_stored_episode_of_a_trial_it_acts_as_the_workers_did_in_the_second(made):
    run = metaloom.open_run(made("robot"))
    batch, policy = run[1].rollouts(0), run.policy(1)
    # Episode 2 is the second one of the first of two trials, whose first one is episode 0.
    adapted = policy.adapt(first_episodes(batch, 1))
    assert adapted.num_tasks == 3
    first, mean = batch.observations[:, 2, 0], batch.behavior["mean"][:, 2, 0]
    np.testing.assert_allclose(adapted.act(first), mean, atol=1e-6)
    assert not np.allclose(policy.act(first), mean, atol=1e-6)
    np.testing.assert_allclose(adapted.task(1).act(first[1]), mean[1], atol=1e-6)
    np.testing.assert_array_equal(adapted.params["trial.last"][:, -1], 1)


def first_episodes(batch, number):
    """So many episodes of each task."""

    def cut(value):
        return value[:, :number]

    places = ("observations", "actions", "rewards", "terminated", "truncated", "lengths", "initial_state")
    return type(batch)(
        **{name: cut(getattr(batch, name)) for name in places},
        reward_terms={name: cut(value) for name, value in batch.reward_terms.items()},
        behavior={name: cut(value) if value.ndim > 2 else value for name, value in batch.behavior.items()},
    )


def test_adapting_is_to_remember_and_reset_is_to_begin_a_trial(made):
    run = metaloom.open_run(made("robot"))
    policy, env = run.policy(1), make_env(config_of("robot").env)
    env.set_task(np.array([0.3, -0.2]))
    adapted = policy.adapt(env, episodes=2)
    seen = np.array([0.1, 0.2])
    fresh, remembered = policy.act(seen), adapted.act(seen)
    assert not np.array_equal(fresh, remembered)
    with pytest.raises(UsageError, match=r"call `policy.observe\(reward, ended\)` after every step"):
        policy.act(seen)
    policy.observe(1.0, False)
    assert not np.array_equal(policy.act(seen), fresh)
    for each, first in ((policy, fresh), (adapted, remembered)):
        each.reset()
        assert np.array_equal(each.act(seen), first)
    # Weighing actions is no step.
    policy.reset()
    before = policy.log_prob(seen, fresh)
    assert np.array_equal(policy.log_prob(seen, fresh), before)
    # What was drawn is remembered by what is then most likely, and the other way round.
    policy.act(seen, deterministic=False)
    policy.observe(1.0, False)
    assert not np.array_equal(policy.act(seen), fresh)
    policy.observe(0.0, True)
    with pytest.raises(UsageError, match="got 2 observations for a policy that remembers 1"):
        policy.act(np.stack([seen, seen]))
    with pytest.raises(UsageError, match="got rewards without new actions"):
        policy.observe(0.0, True)
    policy.act(seen)
    for rewards, ended in ((np.nan, False), ([1.0, 2.0], False), (1.0, [False, True])):
        with pytest.raises(ValueError, match="for 1 actions; pass a finite reward for each"):
            policy.observe(rewards, ended)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_a_copy_of_a_policy_goes_on_in_the_trial_with_what_it_remembers(made, copied, deterministic):
    policy = metaloom.open_run(made("robot")).policy()
    for t in range(3):
        policy.act(np.array([0.1 * t, 0.5]), deterministic=deterministic)
        policy.observe(-1.0, t == 1)
    policy.act(np.ones(2), deterministic=deterministic)
    other = copied(policy)  # which has yet to hear what that earned
    for t in range(40):
        for each in (policy, other):
            each.observe(0.1 * t, False)
        seen = np.array([0.3, 0.1 * t])
        acted = [each.act(seen, deterministic=deterministic) for each in (policy, other)]
        assert np.array_equal(*acted)


def test_a_saved_policy_keeps_what_it_remembers(made, tmp_path):
    run = metaloom.open_run(made("robot"))
    env = make_env(config_of("robot").env)
    adapted = run.policy().adapt(env, episodes=2)
    adapted.save(tmp_path / "policy.safetensors")
    loaded = metaloom.load_policy(tmp_path / "policy.safetensors")
    assert np.array_equal(loaded.act(np.ones(2)), adapted.act(np.ones(2)))
    with pytest.raises(UsageError, match=r"use `policy.unadapted.adapt`"):
        loaded.adapt(env)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("episodes_per_task=3", "episodes_per_task is 3 but a trial has 2 episodes"),
        ("policy.network=mlp", "policy.network is mlp, which has no memory; use gru, lstm"),
        ("policy.hidden_sizes=[8, 8]", "network gru has a single layer"),
        ("baseline=linear_feature", "rl2 learns its own values"),
        ("min_steps=10", "the same number of episodes in every trial"),
        ("policy.activation=relu", "activation is relu but network is gru"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_reason(change, reason):
    with pytest.raises(ConfigError, match=reason):
        config_of("robot", change)


@pytest.mark.parametrize("recipe", ["rl2-bandit", "varibad-hidden-goal-grid"])
def test_a_standard_deviation_is_refused_where_actions_are_discrete(recipe, tmp_path):
    with pytest.raises(ConfigError, match=r"'init_std': 0\.5.* 5 discrete actions; remove it"):
        train(recipe_config(recipe, ["policy.init_std=0.5", "iterations=1"]), tmp_path / "run", backend=SERIAL)
    assert not (tmp_path / "run").exists()


def test_a_network_with_a_memory_is_refused_where_nothing_remembers(tmp_path):
    before = RECIPES["ppo"]()
    settings = before.model_dump(mode="json", include=before.model_fields_set)
    with pytest.raises(
        ConfigError, match=r"policy\.network is gru, which has a memory, but ppo keeps none; .*recurrent-ppo"
    ):
        build_config(override(settings, ["policy={network: gru, hidden_sizes: [8]}", "env=CartPole-v1"]))
    config = build_config(
        override(settings, ["algorithm.critic_network=gru", "algorithm.critic_hidden_sizes=[8]", "env=CartPole-v1"])
    )
    with pytest.raises(ConfigError, match=r"policy\.network is gru, which has a memory, but the algorithm's actor has"):
        train(config, tmp_path / "run", backend=SERIAL)


def test_what_trials_earn_first_and_last_is_told_and_drawn(made):
    run = metaloom.open_run(made("robot"))
    last, returns = run[1].update().metrics, run[1].rollouts(0).episode_returns
    ends = np.array([returns[:, :2].mean(), returns[:, 2:].mean()])  # two trials of two episodes side by side
    np.testing.assert_allclose([last["first_episode_return"], last["last_episode_return"]], ends, rtol=1e-6)
    assert trial_returns(last) == [last["first_episode_return"], last["last_episode_return"]]
    first, second = map(number, trial_returns(last))
    told = returns_text(IterationReport(1, 2, last, {}, 1.0, None)).plain
    assert told == f"{number(last['step_0.average_return'])} (first episode {first}, last {second})"
    chart = next(chart for chart in run_charts(run, load_history(run)) if chart.name == "trial_returns")
    drawn = {series.label: series.values[1] for series in chart.panels[0].series}
    np.testing.assert_allclose([drawn["first episode"], drawn["last episode"]], ends, rtol=1e-6)


def test_trials_of_one_episode_have_no_other_end():
    alone = {"step_0.average_return": 2.0, "first_episode_return": 2.0, "last_episode_return": 2.0}
    assert not trial_returns(alone)
    assert returns_text(IterationReport(0, 1, alone, {}, 1.0, None)).plain == "2"


def test_the_page_of_an_iteration_tells_first_and_last_episodes_of_trials_apart(made):
    run = storage.open_run(made("robot"))
    assert returns_by_task(run, 1)["trial"] == 2
    rounds = adaptation_page(run, 1)["ways"]["rounds"]
    assert [one["label"] for one in rounds] == ["in first episodes of trials", "in last episodes of trials"]
    batch = metaloom.open_run(made("robot"))[1].rollouts(0)
    for one, episodes in zip(rounds, ((0, 1), (2, 3)), strict=True):
        for b, ways in enumerate(one["tasks"]):
            for way, e in zip(ways, episodes, strict=True):
                real = batch.observations[b, e, : batch.lengths[b, e] + 1]
                np.testing.assert_allclose(way, real.T, rtol=1e-6)


def test_sizes_count_trials():
    about = next(row for row in recipe_rows() if row["name"] == "rl2-navigation-2d")
    assert about["sizes"] == "40 tasks x 2 trials of 2 episodes x 100 steps"


def test_a_comparison_says_whose_return_of_training_is_that_of_whole_trials(made, tmp_path):
    train(recipe_config("promp", [*SMALL, "env=navigation-2d"]), tmp_path / "promp", backend=SERIAL)
    found = metaloom.compare([str(made("robot")), str(tmp_path / "promp")], metric="return")
    assert {group.name for group in found.groups} == {"algorithm.name=promp", "algorithm.name=rl2"}
    of_trials = f"the training return of {made('robot').name} and runs like it covers whole trials"
    assert any(note.startswith(of_trials) for note in found.notes)
    assert not metaloom.compare([str(made("robot")), str(made("lstm"))], metric="return").notes
    found = metaloom.compare([str(made("robot")), str(made("lstm")), str(tmp_path / "promp")], metric="return")
    (verdict,) = found.verdicts
    # One run of each: of two runs and two groups there are two ways to divide them, both as extreme.
    assert verdict.startswith("too few seeds to rank any two of 3 groups: with 3 pairs the smallest possible p-value")


@pytest.mark.parametrize("recipe", ["rl2", "rl2-trpo", "varibad"])
def test_actions_of_an_environment_of_ones_choice_are_scaled_as_in_the_recipe(recipe):
    named = new_config(recipe, ["env=navigation-2d"])
    assert named.env.action_scale == new_config(recipe).env.action_scale == 1
    assert new_config(recipe, ["env=navigation-2d", "env.action_scale=10"]).env.action_scale == 10
    assert new_config(recipe, ["env=bernoulli-bandit"]).env.action_scale is None
