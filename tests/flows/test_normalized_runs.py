"""Runs with normalized observations and rewards: statistics are learned, stored and used as all else of a learner."""

from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from small_runs import GRADIENT_BASED, RECURRENT, SMALL_RUNS

import metaloom
from metaloom import storage
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.optimize import optimize
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import resume, train
from metaloom.flows.errors import UsageError
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.input import ConfigError, override
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.estimation.normalization import CLIP, MEAN, PREFIX, REWARD_STD, STD

pytestmark = pytest.mark.usefixtures("warm")

HERE = Backend(workers=0)
NORMALIZED = ("policy.normalize_observations=true", "processing.scale_rewards=true", "policy.hidden_sizes=[8]")
ON_POLICY = (*GRADIENT_BASED, "a2c", "ppo", "ppo2", "svpg", *RECURRENT, "rl2", "rl2-trpo")
OFTEN = ("promp", "ppo", "rl2")


def small(name, *changes):
    recipe, *settings = SMALL_RUNS[name]
    return build_config(override(load_settings(recipe), [*settings, *NORMALIZED, "iterations=3", *changes]))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs by name, each trained when it is first asked for."""
    root, found = tmp_path_factory.mktemp("normalized"), {}

    def run_of(name):
        if name not in found:
            train(small(name), root / name, backend=HERE)
            found[name] = metaloom.open_run(root / name)
        return found[name]

    return run_of


def statistics_of(run, updates):
    learner = run.learner_ref(updates)
    return {name: value for name, value in run.load(learner).learner.extra.items() if name.startswith(PREFIX)}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.sweep) for n in ON_POLICY])
def test_a_normalized_run_is_replayed_resumed_and_forked_bit_for_bit(made, tmp_path, digests, name):
    run = made(name)
    assert all(outcome.identical for outcome in replay(run.path))
    train(small(name, "iterations=2"), tmp_path / "halves", backend=HERE)
    resume(tmp_path / "halves", iterations=3, backend=HERE)
    assert digests(run.path) == digests(tmp_path / "halves")
    fork(run.path, 1, tmp_path / "fork")
    resume(tmp_path / "fork", backend=HERE)
    assert digests(run.path) == digests(tmp_path / "fork")


@pytest.mark.dask
@pytest.mark.parametrize("name", ["promp", "rl2"])
def test_workers_change_no_bit_of_a_normalized_run(made, tmp_path, digests, name):
    train(small(name), tmp_path / "there", backend=Backend(workers=2))
    assert digests(made(name).path) == digests(tmp_path / "there")


@pytest.mark.parametrize("name", ["promp", "ppo"])
def test_statistics_are_those_of_all_stored_episodes_before_an_iteration(made, name):
    run = made(name)
    seen, earned = [np.zeros((0, run[0].rollouts(0).observations.shape[-1]))], [np.zeros(0)]
    discount = run.config["processing"]["discount"]
    for iteration in range(3):
        found = statistics_of(run, iteration)
        for values, kind in ((np.concatenate(seen), "observations"), (np.concatenate(earned), "returns")):
            n = len(values)
            # The statistics begin as if 1e-4 rows of mean 0 and variance 1 had been seen.
            count, mean = n + 1e-4, values.sum(axis=0) / (n + 1e-4)
            variance = (np.square(values - mean).sum(axis=0) + 1e-4 * (1 + np.square(mean))) / count
            assert_allclose(found[f"{PREFIX}{kind}.count"], count, rtol=1e-12)
            assert_allclose(found[f"{PREFIX}{kind}.mean"], mean, rtol=1e-9, atol=1e-12)
            assert_allclose(found[f"{PREFIX}{kind}.variance"], variance, rtol=1e-9, atol=1e-12)
        for k in range(2 if name == "promp" else 1):
            batch = run[iteration].rollouts(k)
            for (b, e), n in np.ndenumerate(batch.lengths):
                if n:
                    seen.append(batch.observations[b, e, : n + 1].astype(np.float64))
                    weights = discount ** np.subtract.outer(np.arange(n), np.arange(n)).astype(float)
                    earned.append(np.tril(weights) @ batch.rewards[b, e, :n].astype(np.float64))


@pytest.mark.parametrize("name", OFTEN)
def test_a_policy_of_a_normalized_run_acts_as_the_run_did_and_survives_as_a_file(made, tmp_path, name):
    run = made(name)
    policy, batch = run.policy(2), run[2].rollouts(0)
    first = batch.observations[:, :, 0]
    behavior = batch.behavior
    expected = behavior["mean"][:, :1, 0] if "mean" in behavior else behavior["log_probs"][:, :1, 0].argmax(-1)
    assert_allclose(policy.act(first[:1, :1].repeat(1, axis=0)), expected[:1], atol=1e-6)
    statistics = statistics_of(run, 2)
    assert_array_equal(policy.params[MEAN][0], statistics[f"{PREFIX}observations.mean"].astype(np.float32))
    assert_array_equal(policy.params[STD][0] ** 2 > 0, True)
    assert policy.params[REWARD_STD].shape == (1,)
    policy.save(tmp_path / "policy.safetensors")
    again, policy = metaloom.load_policy(tmp_path / "policy.safetensors"), run.policy(2)
    seen = 3 * np.random.default_rng(0).standard_normal((5, first.shape[-1])).astype(np.float32)
    assert_array_equal(again(seen), policy(seen))
    if name == "rl2":
        return
    policy.save(tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "policy.onnx"))
    far = np.concatenate([seen, 1e6 * seen])  # where observations are clipped
    (actions,) = session.run(None, {"observations": far})
    assert_allclose(actions, policy(far), atol=1e-6)


@pytest.mark.parametrize("name", ["promp", "vpg-dice"])
def test_a_policy_of_a_normalized_run_adapts_as_the_run_did(made, name):
    run = made(name)
    adapted, stored = run.policy(2).adapt(run[2].rollouts(0)), run[2].adapted(0).params
    assert adapted.params.keys() == stored.keys() >= {MEAN, STD, REWARD_STD}
    for name, value in stored.items():
        assert_array_equal(adapted.params[name], value)
    after = run[2].rollouts(1)
    assert_allclose(adapted.act(after.observations[:, :, :-1]), after.behavior["mean"], atol=1e-6)


def test_a_memory_sees_scaled_rewards_while_acting_and_learning(made):
    run = made("rl2")
    policy, batch = run.policy(2), run[2].rollouts(0)
    acting = policy.params
    scaled = np.clip(batch.rewards / acting[REWARD_STD][0], -CLIP, CLIP)
    assert np.abs(scaled - batch.rewards).max() > 0.05
    seen = replace(batch, observations=(batch.observations - acting[MEAN][0]) / acting[STD][0], rewards=scaled)
    learner = policy.blueprint.learner().unwrapped
    trials = learner.trials(seen)
    params = {name: torch.as_tensor(value) for name, value in policy.state.params.items()}
    with torch.no_grad():
        features = learner.policy.features(params, torch.as_tensor(trials.inputs.swapaxes(0, 1)))
        flat = learner.policy.distribution(params, features.flatten(0, 1)).mean
        means = flat.unflatten(0, features.shape[:2]).swapaxes(0, 1).numpy()
    assert_allclose(trials.behavior["mean"][trials.mask], means[trials.mask], atol=1e-5)


def test_evaluations_use_the_statistics_of_the_learner_and_leave_them(made, digests):
    run = made("promp")
    before = digests(run.path)
    found = [evaluate(run.path, num_tasks=3, seed=4, backend=HERE) for _ in range(2)]
    assert_array_equal(found[0].evaluation.test_returns, found[1].evaluation.test_returns)
    assert digests(run.path) == before


def test_a_warm_start_goes_on_with_the_statistics_and_not_without_them(made, tmp_path):
    run = made("ppo")
    train(small("ppo", f"init_from={run.path}", "iterations=1"), tmp_path / "warm", backend=HERE)
    started, source = storage.open_run(tmp_path / "warm")[0].learner(), statistics_of(run, 3)
    assert source
    for name, value in source.items():
        assert_array_equal(started.extra[name], value)
    for change, value, told in (
        ("policy.normalize_observations", "false", "is False here and True in"),
        ("processing.scale_rewards", "false", "is False here and True in"),
        ("env.action_scale", "3", r"is 3\.0 here and .* in"),
    ):
        other = small("ppo", f"init_from={run.path}", f"{change}={value}")
        with pytest.raises(ConfigError, match=f"{change} {told}"):
            train(other, tmp_path / "other", backend=HERE)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("change", ["policy.normalize_observations", "processing.scale_rewards"])
def test_a_fork_cannot_begin_or_cease_to_normalize(made, tmp_path, change):
    with pytest.raises(ConfigError, match=rf"the learner.*{PREFIX}.*train a new run"):
        fork(made("ppo").path, 1, tmp_path / "fork", [f"{change}=false"])
    assert not (tmp_path / "fork").exists()


def test_scaling_can_be_changed_in_a_stored_update_unless_a_memory_has_seen_the_rewards(made):
    off = ["processing.scale_rewards=false"]
    changed = optimize(made("ppo").path, 2, off)
    assert changed.stored.identical
    assert not changed.changed.identical
    with pytest.raises(UsageError, match=r"changes to processing\.scale_rewards affect sampling"):
        optimize(made("rl2").path, 2, off)


@pytest.mark.parametrize("name", ["sac", "dql", "pearl", "varibad"])
def test_algorithms_that_learn_from_earlier_iterations_refuse_normalization(name):
    with pytest.raises(
        ConfigError, match=f"scale_rewards is on, but {name} also learns from earlier iterations, which"
    ):
        small(name)


def test_images_are_not_normalized_and_nothing_is_stored(tmp_path, monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.config.rootpath / "examples"))
    config = build_config(
        override(
            load_settings("a2c"),
            ["env=pixels:Catch", "env.copies=kept", "policy.network=cnn", "policy.normalize_observations=true"],
        )
    )
    with pytest.raises(ConfigError, match="pixels:Catch are bytes, which are divided by 255; turn it off"):
        train(config, tmp_path / "run", backend=HERE)
    assert not (tmp_path / "run").exists()


def test_the_digest_of_settings_without_normalization_is_what_it_was():
    plain, on = (
        build_config(override(load_settings("ppo"), ["env=CartPole-v1", *changes])) for changes in ((), NORMALIZED[:2])
    )
    assert "normalize_observations" not in plain.policy.decisive()
    assert "scale_rewards" not in plain.processing.decisive()
    assert plain.digest() != on.digest()
