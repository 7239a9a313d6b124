"""The loss of PPO on whole trials, under a recurrent policy, against the same written out step by step."""

import numpy as np
import pytest
import torch
from cell_steps import OPTIONS, STEPS
from small_setups import A, O

from metaloom.pipeline.algorithms.actor_critic.gradient_steps import clip_fraction
from metaloom.pipeline.algorithms.trials.losses import Sequences, sequence_loss
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.build import RecurrentPolicy
from metaloom.pipeline.policies.config import PolicyConfig

CONTINUOUS = Spaces((O,), 1.0, A, 0)
DISCRETE = Spaces((O,), 1.0, 0, 4)
LENGTHS = (5, 2, 4)
WEIGHTS = {"clip_eps": 0.2, "value": 0.7, "entropy": 0.3}


def toy(network, spaces):
    """A policy in float64 with values, and trials of several lengths."""
    torch.manual_seed(0)
    name, options = network.split()[0], OPTIONS[network]
    policy = RecurrentPolicy(spaces, PolicyConfig(network=name, hidden_sizes=(6,), network_options=options))
    initial = policy.initialize(np.random.default_rng(1), 1.0)
    params = {name: torch.tensor(value).double().requires_grad_() for name, value in initial.items()}
    params["critic"] = torch.randn(6, dtype=torch.float64).requires_grad_()
    size = O + (spaces.num_actions or spaces.action_size) + 2
    inputs = torch.randn(max(LENGTHS), len(LENGTHS), size, dtype=torch.float64)
    n = sum(LENGTHS)
    actions = torch.randint(4, (n,)) if spaces.num_actions else torch.randn(n, A, dtype=torch.float64)
    mask = torch.arange(max(LENGTHS))[:, None] < torch.tensor(LENGTHS)
    old, advantages, targets = torch.randn(3, n, dtype=torch.float64)
    return policy, params, Sequences(inputs, mask.flatten().nonzero()[:, 0], actions, old - 3, advantages, targets)


def unrolled_loss(params, of, spaces, step, state_size):
    """The mean over real steps, one trial after the other, one step after the other."""
    places = of.real.tolist()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for trial, length in enumerate(LENGTHS):
        state = torch.zeros(state_size, dtype=torch.float64)
        for t in range(length):
            h, state = step(params, of.inputs[t, trial], state)
            row = places.index(t * len(LENGTHS) + trial)
            if spaces.num_actions:
                outputs = h @ params["logits_network.output.kernel"] + params["logits_network.output.bias"]
                now = torch.distributions.Categorical(logits=outputs)
                log_prob, entropy = now.log_prob(of.actions[row]), now.entropy()
            else:
                mean = h @ params["mean_network.output.kernel"] + params["mean_network.output.bias"]
                now = torch.distributions.Normal(mean, params["log_std"].exp())
                log_prob, entropy = now.log_prob(of.actions[row]).sum(), now.entropy().sum()
            ratio, advantage = (log_prob - of.old_log_prob[row]).exp(), of.advantages[row]
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            error = h @ params["critic"] - of.targets[row]
            total = total - surrogate + 0.7 * 0.5 * error**2 - 0.3 * entropy
            count += 1
    return total / count


@pytest.mark.parametrize("spaces", [CONTINUOUS, DISCRETE], ids=["gaussian", "categorical"])
@pytest.mark.parametrize("network", STEPS)
def test_the_gradient_is_that_of_the_loss_written_out_step_by_step(network, spaces):
    policy, params, of = toy(network, spaces)
    rows = of.rows(policy.features(params, of.inputs))
    loss = sequence_loss(policy.distribution(params, rows), rows @ params["critic"], of, **WEIGHTS)
    expected = unrolled_loss(params, of, spaces, STEPS[network], policy.cell.state_size)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    found, wanted = (torch.autograd.grad(value, [*params.values()]) for value in (loss, expected))
    for name, gradient, other in zip(params, found, wanted, strict=True):
        assert other.abs().max() > 0, name
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("network", ["gru", "linear-attention"])
def test_what_lies_behind_a_trials_end_changes_nothing(network):
    policy, params, of = toy(network, CONTINUOUS)
    changed = of.inputs.clone()
    changed[LENGTHS[1] :, 1] = 1e3
    rows, same = (of.rows(policy.features(params, inputs)) for inputs in (of.inputs, changed))
    assert torch.equal(rows, same)


def test_the_fraction_out_of_range_counts_steps():
    ratios = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.19, 1.21])
    assert clip_fraction(ratios.log(), torch.zeros(6), 0.2).item() == pytest.approx(0.5)
    assert clip_fraction(torch.zeros(6), torch.zeros(6), 0.0).item() == 0  # none that is at the limit
