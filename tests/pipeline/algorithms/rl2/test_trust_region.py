"""RL2's trust region: gradient and metric on whole trials against central differences, and what an update keeps to."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cell_steps import OPTIONS, STEPS
from small_setups import A, O, small_setup

from metaloom.pipeline.algorithms.contract import NumericalError
from metaloom.pipeline.algorithms.rl2.learner import MemoryPolicy, SequenceRegion, TrialChunk
from metaloom.pipeline.algorithms.trials.losses import Sequences
from metaloom.pipeline.algorithms.trials.settings import RL2TRPO
from metaloom.pipeline.nn.distributions import Categorical, DiagGaussian
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.types import Step

LENGTHS, HIDDEN, NUM_ACTIONS = (5, 2, 4), 3, 4
KINDS = [(network, kind) for network in STEPS for kind in ("gaussian", "categorical")]


def toy(network, kind):
    """A policy in float64 and trials of several lengths, in two chunks, in which it acted."""
    discrete = kind == "categorical"
    name, options = network.split()[0], OPTIONS[network]
    setup = small_setup(PolicyConfig(network=name, hidden_sizes=(HIDDEN,), network_options=options))
    if discrete:
        setup = replace(setup, action_size=0, num_actions=NUM_ACTIONS)
    policy, rng = MemoryPolicy(RL2TRPO(trial_end="unseen"), setup), np.random.default_rng(0)
    params = {name: value.astype(np.float64) for name, value in policy.initialize(rng, 1.0).items()}
    size = O + (NUM_ACTIONS if discrete else A) + 2
    chunks = []
    for lengths in (LENGTHS[:2], LENGTHS[2:]):
        n, L = sum(lengths), max(lengths)
        mask = np.arange(L)[:, None] < lengths
        real = torch.from_numpy(np.flatnonzero(mask))
        actions = rng.integers(NUM_ACTIONS, size=n) if discrete else rng.standard_normal((n, A))
        inputs, advantages = rng.standard_normal((L, len(lengths), size)), rng.standard_normal(n)
        nothing = torch.zeros(n, dtype=torch.float64)
        tensors = [torch.from_numpy(value) for value in (inputs, actions, advantages)]
        of = Sequences(tensors[0], real, tensors[1], nothing, tensors[2], nothing)
        acted = policy.acting({name: torch.tensor(value) for name, value in params.items()}, of)
        of = replace(of, old_log_prob=acted.log_prob(of.actions))
        chunks.append(TrialChunk(of, acted))
    return policy, params, chunks


def outputs(params, chunk, network):
    """The policy's outputs [n, ...] in order of trial and step, one step after the other."""
    tensors = {name: torch.tensor(value) for name, value in params.items()}
    head = "logits_network" if "logits_network.output.kernel" in params else "mean_network"
    places, found = chunk.of.real.tolist(), {}
    for trial in range(chunk.of.inputs.shape[1]):
        sizes = {"gru": HIDDEN, "lstm": 2 * HIDDEN}
        state = torch.zeros(sizes.get(network, 3 * 2 + chunk.of.inputs.shape[-1]), dtype=torch.float64)
        for t in range(chunk.of.inputs.shape[0]):
            place = t * chunk.of.inputs.shape[1] + trial
            if place in places:
                features, state = STEPS[network](tensors, chunk.of.inputs[t, trial], state)
                row = features @ tensors[f"{head}.output.kernel"] + tensors[f"{head}.output.bias"]
                found[places.index(place)] = row
    return torch.stack([found[n] for n in range(len(places))]), tensors.get("log_std")


def acting(params, chunk, network):
    rows, log_std = outputs(params, chunk, network)
    return Categorical.of_logits(rows) if log_std is None else DiagGaussian(rows, log_std)


def loss_at(params, chunks, network):
    total = 0.0
    for chunk in chunks:
        ratio = (acting(params, chunk, network).log_prob(chunk.of.actions) - chunk.of.old_log_prob).exp()
        total -= float((ratio * chunk.of.advantages).sum())
    return total / sum(LENGTHS)


@pytest.mark.parametrize(("network", "kind"), KINDS)
def test_the_gradient_is_that_of_central_differences_of_the_loss_step_by_step(network, kind):
    policy, params, chunks = toy(network, kind)
    region = SequenceRegion(policy, params, chunks)
    found, rng = region.gradient(), np.random.default_rng(1)
    assert region.at(params).loss == pytest.approx(loss_at(params, chunks, network), rel=1e-12)
    for _ in range(3):
        v, eps = rng.standard_normal(len(found)), 1e-5
        moved = [
            loss_at(params | {n: params[n] + s * eps * d for n, d in region.flat.views(v).items()}, chunks, network)
            for s in (1, -1)
        ]
        assert found @ v == pytest.approx((moved[0] - moved[1]) / (2 * eps), rel=1e-6)


def fisher(params, chunks, network, flat):
    """Jᵀ F J, with the Jacobian J of the outputs by central differences and the Fisher matrix F in closed form."""
    eps, total = 1e-5, 0.0
    D = len(flat.vector)
    for chunk in chunks:
        columns = []
        for d in range(D):
            moved = []
            for sign in (1, -1):
                shift = flat.views(np.eye(D)[d] * sign * eps)
                rows, log_std = outputs(params | {n: params[n] + s for n, s in shift.items()}, chunk, network)
                moved.append(np.concatenate([rows.numpy(), np.tile(log_std, (len(rows), 1))], 1) if log_std is not None
                             else rows.numpy())  # fmt: skip
            columns.append((moved[0] - moved[1]) / (2 * eps))
        jacobian = np.stack(columns, -1)  # [n, outputs, D]
        rows, log_std = outputs(params, chunk, network)
        for n in range(len(rows)):
            if log_std is None:
                p = torch.softmax(rows[n], -1).numpy()
                inner = np.diag(p) - np.outer(p, p)
            else:  # of (mean, log_std): 1/σ² and 2
                inner = np.diag(np.concatenate([np.exp(-2 * log_std.numpy()), np.full(len(log_std), 2.0)]))
            total = total + jacobian[n].T @ inner @ jacobian[n]
    return total / sum(LENGTHS)


@pytest.mark.parametrize(("network", "kind"), KINDS)
def test_products_are_with_the_fisher_matrix_of_all_steps_of_the_trials(network, kind):
    policy, params, chunks = toy(network, kind)
    region = SequenceRegion(policy, params, chunks)
    matrix = fisher(params, chunks, network, region.flat)
    for v in np.random.default_rng(2).standard_normal((3, len(matrix))):
        np.testing.assert_allclose(region.product(v), matrix @ v, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("chunk", [1, 2, 64])
def test_a_step_lowers_the_loss_within_the_bound_or_leaves_the_policy_alone(episodes, chunk):
    learner = RL2TRPO(episodes_per_trial=2, max_kl=0.02, trials_per_chunk=chunk).build(
        small_setup(PolicyConfig(network="gru", hidden_sizes=(6,)))
    )
    state = learner.initialize(run_seed=1)
    assert state.optimizer == {}
    step = Step(episodes, learner.process(state, episodes, seed=0), 0)
    acted = replace_behavior(episodes, learner, state)
    after, metrics = learner.update(state, [replace(step, episodes=acted)], run_seed=1, iteration=0)
    assert metrics["step_accepted"] == 1
    assert 0 < metrics["kl"] <= 0.02
    before = -float((step.samples.advantages * step.samples.mask).sum() / step.samples.mask.sum())
    assert metrics["loss_after"] < before
    assert all(not np.array_equal(after.params[name], state.params[name]) for name in state.params)


def test_where_no_advantage_tells_actions_apart_the_policy_stays(episodes):
    learner = RL2TRPO(episodes_per_trial=2).build(small_setup(PolicyConfig(network="gru", hidden_sizes=(6,))))
    state = learner.initialize(run_seed=1)
    samples = learner.process(state, episodes, seed=0)
    step = Step(episodes, replace(samples, advantages=np.zeros_like(samples.advantages)), 0)
    after, metrics = learner.update(state, [step], run_seed=1, iteration=0)
    assert (metrics["step_accepted"], metrics["line_search_trials"]) == (0, 0)
    assert all(np.array_equal(after.params[name], state.params[name]) for name in state.params)
    assert after.extra["critic.output.bias"] != 0


def test_values_are_fitted_to_their_targets_on_the_memory_after_the_step(episodes):
    learner = RL2TRPO(episodes_per_trial=2, critic_regularization=0).build(
        small_setup(PolicyConfig(network="gru", hidden_sizes=(6,)))
    )
    state = learner.initialize(run_seed=1)
    step = Step(episodes, learner.process(state, episodes, seed=0), 0)
    after, metrics = learner.update(state, [step], run_seed=1, iteration=0)
    trials = learner.trials(episodes)
    inputs = torch.from_numpy(np.ascontiguousarray(learner.inputs(trials).swapaxes(0, 1)))
    tensors = {name: torch.tensor(value) for name, value in after.params.items()}
    features = learner.policy.judging(learner.policy.features(tensors, inputs), inputs)
    features = features.flatten(0, 1).numpy().astype(np.float64)
    setup = learner.setup.processing
    targets = trials.advantages(np.zeros(trials.mask.shape), setup.discount, setup.gae_lambda).swapaxes(0, 1).ravel()
    rows = np.concatenate([features, np.ones((len(features), 1))], 1)
    best = np.linalg.lstsq(rows, targets, rcond=None)[0]
    assert metrics["value_loss_after"] == pytest.approx(0.5 * np.mean((rows @ best - targets) ** 2), rel=1e-3)
    mean, std = after.extra["critic.scale"]
    found = features @ after.extra["critic.output.kernel"][:, 0] + after.extra["critic.output.bias"][0]
    np.testing.assert_allclose(found * std + mean, rows @ best, atol=1e-2)


def replace_behavior(episodes, learner, state):
    """The same episodes as if the policy had acted in them."""
    trials = learner.trials(episodes)
    inputs = torch.from_numpy(np.ascontiguousarray(learner.inputs(trials).swapaxes(0, 1)))
    tensors = {name: torch.tensor(value) for name, value in state.params.items()}
    features = learner.policy.features(tensors, inputs)
    means = learner.policy.distribution(tensors, features.flatten(0, 1)).mean
    means = means.unflatten(0, features.shape[:2]).numpy().swapaxes(0, 1)
    B, E, T = episodes.rewards.shape
    by_episode = np.ascontiguousarray(means.reshape(B, E // 2, 2, T, A).swapaxes(1, 2)).reshape(B, E, T, A)
    return replace(episodes, behavior={**episodes.behavior, "mean": by_episode})


@pytest.mark.parametrize(("trial_end", "blamed"), [("seen", False), ("unseen", True)])
def test_a_critic_that_sees_how_far_a_trial_has_come_does_not_blame_its_last_steps(episodes, trial_end, blamed):
    # Every step pays 1 whatever is done, so a trial is worth the discounted number of steps that are left.
    paid = replace(episodes, rewards=np.ones_like(episodes.rewards))
    learner = RL2TRPO(episodes_per_trial=2, critic_regularization=1e-9, trial_end=trial_end).build(
        small_setup(PolicyConfig(network="gru", hidden_sizes=(2,)), max_episode_steps=paid.rewards.shape[2])
    )
    state = learner.initialize(run_seed=1)
    _, samples, discount = paid, learner.process(state, paid, seed=0), learner.setup.processing.discount
    after, metrics = learner.update(state, [Step(paid, samples, 0)], run_seed=1, iteration=0)
    worth = (1 - discount ** np.arange(10, 0, -1)) / (1 - discount)
    values = learner.trials(paid).along(learner.process(after, paid, seed=0).values)
    assert (np.abs(values - worth).max() > 0.05) == blamed
    assert ("end_advantage_share" in metrics) == (not blamed)


def test_the_last_twelfth_of_a_trial_is_described(episodes):
    learner = RL2TRPO(episodes_per_trial=2).build(small_setup(PolicyConfig(network="gru", hidden_sizes=(6,))))
    state = learner.initialize(run_seed=1)
    samples = learner.process(state, episodes, seed=0)
    advantages = np.zeros_like(samples.advantages)
    advantages[:, :, 0] = 1.0
    advantages[:, 2:, -1] = -3.0  # of ten steps of a trial in two episodes, one is a twelfth
    _, metrics = learner.update(
        state, [Step(episodes, replace(samples, advantages=advantages), 0)], run_seed=1, iteration=0
    )
    assert metrics["end_advantage_share"] == pytest.approx(9 / 11)
    assert metrics["end_advantage_mean"] == -3


def test_a_gradient_that_is_not_finite_is_refused_before_a_step_is_tried(episodes):
    learner = RL2TRPO(episodes_per_trial=2).build(small_setup(PolicyConfig(network="gru", hidden_sizes=(6,))))
    state = learner.initialize(run_seed=1)
    samples = learner.process(state, episodes, seed=0)
    endless = replace(samples, advantages=np.full_like(samples.advantages, np.inf))
    with pytest.raises(NumericalError, match="meta_optimize: the gradient of the policy loss is not finite"):
        learner.update(state, [Step(episodes, endless, 0)], run_seed=1, iteration=0)
