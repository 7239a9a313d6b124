"""A2C and PPO with a memory of the episode: how its end is credited, and what an update of A2C descends."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_setups import small_setup

from metaloom.pipeline.algorithms.rl2.learner import CRITIC_BIAS
from metaloom.pipeline.algorithms.trials.losses import sequence_loss
from metaloom.pipeline.algorithms.trials.settings import RL2, RecurrentA2C, RecurrentPPO
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.types import Step

PROCESSING = ProcessingConfig(discount=0.5, gae_lambda=0.0, normalize_advantages=False)
SETUP = replace(small_setup(PolicyConfig(network="gru", hidden_sizes=(6,))), processing=PROCESSING)


def valued(learner, value):
    """A state whose critic gives this value whatever is known."""
    state = learner.initialize(run_seed=1)
    return replace(state, extra={**state.extra, CRITIC_BIAS: np.array([value], np.float32)})


@pytest.mark.parametrize("settings", [RecurrentA2C, RecurrentPPO])
def test_an_end_by_the_step_limit_is_credited_with_the_value_of_what_is_known_there(episodes, settings):
    learner = settings().build(SETUP)
    ended = np.zeros_like(episodes.terminated)
    ended[0, 0] = True
    batch = replace(episodes, terminated=ended, truncated=~ended)
    found = learner.process(valued(learner, 4.0), batch, seed=0)
    # λ = 0: A = r + γ V' - V with V = 4 everywhere, and V' = 0 behind the one end that is the task's own.
    expected = batch.rewards + 0.5 * 4 - 4
    expected[0, 0, -1] -= 0.5 * 4
    np.testing.assert_allclose(found.advantages, expected, atol=1e-5)
    # What RL2 credits a trial's end with is nothing, whoever ended it.
    of_trial = RL2(episodes_per_trial=1).build(SETUP)
    expected[..., -1] = batch.rewards[..., -1] - 4
    np.testing.assert_allclose(of_trial.process(valued(of_trial, 4.0), batch, seed=0).advantages, expected, atol=1e-5)


def test_targets_of_an_update_count_the_credit_too(episodes):
    learner = RecurrentPPO(learning_rate=1e-9).build(SETUP)
    state = valued(learner, 4.0)
    step = Step(episodes, learner.process(state, episodes, seed=0), 0)
    after, _ = learner.update(state, [step], run_seed=1, iteration=0)
    targets = episodes.rewards + 0.5 * 4
    np.testing.assert_allclose(after.extra["critic.scale"], [targets.mean(), targets.std()], rtol=1e-5)
    # Targets that are all equal have no deviation to divide by.
    same = replace(episodes, rewards=np.ones_like(episodes.rewards))
    step = Step(same, learner.process(state, same, seed=0), 0)
    after, _ = learner.update(state, [step], run_seed=1, iteration=0)
    np.testing.assert_allclose(after.extra["critic.scale"], [1 + 0.5 * 4, 1e-4], rtol=1e-5)


def test_a2cs_loss_is_that_of_the_policy_gradient(episodes):
    learner = RecurrentA2C().build(SETUP)
    state = learner.initialize(run_seed=1)
    step = Step(episodes, learner.process(state, episodes, seed=0), 0)
    params = state.params | {name: state.extra[name] for name in (CRITIC_BIAS, "critic.output.kernel")}
    batch = learner.batch(state, step)
    of = batch.sequences(np.array([1, 5, 2]))
    tensors = {name: torch.tensor(value) for name, value in params.items()}
    now, values = learner.policy.judged(tensors, of)
    expected = -(of.advantages * now.log_prob(of.actions)).mean() + 0.3 * 0.5 * (values - of.targets).square().mean()
    found = sequence_loss(now, values, of, clip_eps=None, value=0.3, entropy=0.0)
    torch.testing.assert_close(found, expected)


def test_a2c_makes_one_pass_and_clips_nothing(episodes):
    with pytest.raises(ValueError, match="num_epochs"):
        RecurrentA2C(num_epochs=2)
    learner = RecurrentA2C().build(SETUP)
    state = learner.initialize(run_seed=1)
    step = Step(episodes, learner.process(state, episodes, seed=0), 0)
    _, metrics = learner.update(state, [step], run_seed=1, iteration=0)
    assert "clip_fraction" not in metrics
    assert {"loss_after", "value_loss_after", "kl", "entropy_after", "gradient_norm"} <= metrics.keys()


def test_a_trial_is_an_episode():
    with pytest.raises(ValueError, match="episodes_per_trial"):
        RecurrentPPO(episodes_per_trial=2)
    assert not RecurrentPPO().adapts
    assert RecurrentPPO().trial == 1
