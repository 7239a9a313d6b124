"""RL2's learner on small trials: values in the units of their targets, and what is scaled over which steps."""

from dataclasses import replace

import numpy as np
import pytest
from small_setups import small_setup

from metaloom.pipeline.algorithms.trials.losses import Batch
from metaloom.pipeline.algorithms.trials.settings import RL2
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.types import Step

B, E, T = 3, 4, 5
SETUP = small_setup(PolicyConfig(network="gru", hidden_sizes=(6,)))


def updated(episodes, **settings):
    """A learner, its state before and after an update, and the step between."""
    learner = RL2(episodes_per_trial=2, **settings).build(SETUP)
    state = learner.initialize(run_seed=1)
    step = Step(episodes, learner.process(state, episodes, seed=0), 0)
    after, metrics = learner.update(state, [step], run_seed=1, iteration=0)
    return learner, state, step, after, metrics


def test_advantages_have_mean_zero_and_deviation_one_over_all_trials_together(episodes):
    _, _, step, *_ = updated(episodes)
    advantages = step.samples.advantages
    assert advantages.mean() == pytest.approx(0, abs=1e-6)
    assert advantages.std() == pytest.approx(1, abs=1e-5)
    assert all(abs(task.mean()) > 1e-3 for task in advantages)


def test_returns_count_the_whole_trial(episodes):
    _, _, step, *_ = updated(episodes)
    # Trial 1 of task 2 is its episodes 1 and 3.
    rewards = np.concatenate([episodes.rewards[2, 1], episodes.rewards[2, 3]]).astype(np.float64)
    expected = [rewards[t:] @ SETUP.processing.discount ** np.arange(2 * T - t) for t in range(2 * T)]
    np.testing.assert_allclose(np.concatenate([step.samples.returns[2, 1], step.samples.returns[2, 3]]), expected, 1e-5)


def test_values_are_in_the_units_of_their_targets_after_the_first_update(episodes):
    learner, _state, step, after, metrics = updated(episodes, learning_rate=1e-9)
    assert not step.samples.values.any()
    gae_lambda = SETUP.processing.gae_lambda
    expected = Trials(episodes, 2, 0).advantages(np.zeros((B * 2, 2 * T)), SETUP.processing.discount, gae_lambda)
    np.testing.assert_allclose(after.extra["critic.scale"], [expected.mean(), expected.std()], rtol=1e-5)
    # The layer itself is still zero, so that every value is the mean of the targets.
    values = learner.process(after, episodes, seed=0).values
    np.testing.assert_allclose(values, np.full_like(values, expected.mean()), rtol=1e-4)
    assert metrics["value_loss_after"] == pytest.approx(0.5 * expected.var(), rel=1e-4)


def test_large_rewards_change_the_units_of_values_and_not_the_layer_that_learns_them(episodes):
    _, _, _, after, _ = updated(episodes)
    _, _, _, scaled, _ = updated(replace(episodes, rewards=episodes.rewards * np.float32(1024)))
    # Not the same: the policy sees the rewards themselves.
    norms = [np.linalg.norm(of.extra["critic.output.kernel"]) for of in (after, scaled)]
    assert norms[1] < 10 * norms[0]
    assert scaled.extra["critic.scale"][1] == pytest.approx(1024 * after.extra["critic.scale"][1], rel=1e-4)


def test_a_deviation_that_is_not_learned_stays(episodes):
    setup = replace(SETUP, policy=PolicyConfig(network="gru", hidden_sizes=(6,), learn_std=False))
    learner = RL2(episodes_per_trial=2).build(setup)
    state = learner.initialize(run_seed=1)
    step = Step(episodes, learner.process(state, episodes, seed=0), 0)
    after, _ = learner.update(state, [step], run_seed=1, iteration=0)
    assert np.array_equal(after.params["log_std"], state.params["log_std"])
    assert not np.array_equal(after.params["cell.hidden_kernel"], state.params["cell.hidden_kernel"])


def test_every_epoch_takes_all_trials_in_an_order_of_its_own(episodes, monkeypatch):
    drawn, sequences = [], Batch.sequences
    monkeypatch.setattr(Batch, "sequences", lambda batch, rows: drawn.append(rows.tolist()) or sequences(batch, rows))
    updated(episodes, num_epochs=3, trials_per_minibatch=4)
    parts = [drawn[n : n + 2] for n in (0, 2, 4)]
    assert [sorted(first + second) for first, second in parts] == [[*range(6)]] * 3
    assert [len(first) for first, _ in parts] == [3] * 3  # six trials in as few parts of at most four, of one size
    assert len({tuple(first + second) for first, second in parts}) == 3


def test_an_update_is_the_same_again_and_leaves_its_input_alone(episodes):
    learner, state, step, after, metrics = updated(episodes)
    before = {name: value.copy() for name, value in state.params.items()}
    again, told = learner.update(state, [step], run_seed=1, iteration=0)
    other, _ = learner.update(state, [step], run_seed=1, iteration=1)
    assert told == metrics
    for name, value in before.items():
        assert np.array_equal(state.params[name], value)
        assert np.array_equal(again.params[name], after.params[name])
    assert not np.array_equal(other.params["cell.hidden_kernel"], after.params["cell.hidden_kernel"])
