"""The evidence lower bound of VariBAD, against torch.distributions and the same written out step by step."""

import math

import numpy as np
import pytest
import torch
from cell_steps import gru_step
from small_setups import A, O
from torch.distributions import Bernoulli, Normal, kl_divergence

from metaloom.pipeline.algorithms.varibad.model import (
    DecodedSteps,
    Decoders,
    Encoder,
    RandomDraws,
    TrialTensors,
    elbo,
    kl_between,
    priors_of,
)
from metaloom.pipeline.algorithms.varibad.settings import VariBAD
from metaloom.pipeline.nn.distributions import DiagGaussian
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.posterior import EncoderSizes

LENGTHS, Z = (5, 2, 4), 2
L, N = max(LENGTHS), len(LENGTHS)
KINDS = {
    "gaussian": VariBAD(latent_size=Z, decoder_layers=(4,), decode_states=True),
    "bernoulli": VariBAD(latent_size=Z, decoder_layers=(4,), reward_likelihood="bernoulli"),
    "heads": VariBAD(latent_size=Z, decoder_layers=(4,), reward_likelihood="bernoulli", reward_decoder="heads"),
}
of_kinds = pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)


def test_the_divergence_of_two_gaussians_is_the_one_worked_out_by_hand():
    wide = DiagGaussian(torch.tensor([1.0]), torch.tensor([math.log(2)]))
    standard = DiagGaussian(torch.zeros(1), torch.zeros(1))
    # ½ (σ² + μ² - 1) - log σ = ½ (4 + 1 - 1) - log 2, and the other way round log 2 + ½ (1 + 1) / 4 - ½.
    assert kl_between(wide, standard).item() == pytest.approx(2 - math.log(2), rel=1e-6)
    assert kl_between(standard, wide).item() == pytest.approx(math.log(2) - 0.25, rel=1e-6)


def test_the_divergence_is_that_of_torch_distributions_for_narrow_gaussians_too():
    torch.manual_seed(0)
    mean, other = torch.randn(2, 7, 3, dtype=torch.float64)
    log_std, other_log_std = 4 * torch.randn(2, 7, 3, dtype=torch.float64)
    found = kl_between(DiagGaussian(mean, log_std), DiagGaussian(other, other_log_std))
    expected = kl_divergence(Normal(mean, log_std.exp()), Normal(other, other_log_std.exp())).sum(-1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert other_log_std.min() < -5


def test_a_posterior_is_held_to_the_one_before_and_the_first_to_a_standard_normal():
    torch.manual_seed(0)
    posteriors = DiagGaussian(*torch.randn(2, 4, 3, Z))
    priors = priors_of(posteriors)
    assert not priors.mean[0].any()
    assert not priors.log_std[0].any()
    assert torch.equal(priors.mean[1:], posteriors.mean[:-1])
    assert torch.equal(priors.log_std[1:], posteriors.log_std[:-1])


def toy(settings, lengths=LENGTHS, seed=0):
    """An encoder with decoders in float64, trials of several lengths, and noise."""
    torch.manual_seed(seed)
    encoder, decoders = Encoder(EncoderSizes(3, 4, Z), O + A + 2), Decoders(settings, Spaces((O,), 1.0, A, 0))
    rng = np.random.default_rng(1)
    initial = encoder.initialize(rng) | decoders.initialize(rng)
    params = {name: torch.tensor(value).double() for name, value in initial.items()}
    for value in params.values():
        value.add_(0.1 * torch.randn_like(value)).requires_grad_()  # biases too
    n, longest = len(lengths), max(lengths)

    def drawn(*shape):
        return torch.randn(n, longest, *shape, dtype=torch.float64)

    steps = DecodedSteps(drawn(O), drawn(A), drawn(O), drawn())
    inputs = torch.randn(longest, n, O + A + 2, dtype=torch.float64)
    noise = torch.randn(longest, n, Z, dtype=torch.float64)
    return encoder, decoders, params, TrialTensors(inputs, steps, torch.tensor(lengths)), noise


def network(params, prefix, x):
    hidden = torch.relu(x @ params[f"{prefix}.hidden_0.kernel"] + params[f"{prefix}.hidden_0.bias"])
    return hidden @ params[f"{prefix}.output.kernel"] + params[f"{prefix}.output.bias"]


def decoded(settings, params, m, steps, n, t):
    """Log-likelihoods of a reward and of a next observation given m [Z]."""
    s, a, after, r = (getattr(steps, name)[n, t] for name in ("observations", "taken", "next_observations", "rewards"))
    if settings.reward_decoder == "heads":
        predicted = network(params, "decoder.rewards", m) @ after
    else:
        predicted = network(params, "decoder.rewards", torch.cat([m, s, a, after]))[0]
    if settings.reward_likelihood == "bernoulli":
        rewards = Bernoulli(logits=predicted).log_prob((r > 0).double())
    else:
        rewards = Normal(predicted, 1).log_prob(r)
    if not settings.decode_states:
        return torch.stack([rewards, torch.zeros((), dtype=torch.float64)])
    states = Normal(network(params, "decoder.states", torch.cat([m, s, a])), 1).log_prob(after).sum()
    return torch.stack([rewards, states])


def unrolled(settings, params, trials, noise, at=None, decoded_at=None):
    """Rewards, states and divergence: one trial after the other, one step after the other."""
    total = torch.zeros(3, dtype=torch.float64)
    for n, length in enumerate(trials.lengths.tolist()):
        state, before, found = torch.zeros(4, dtype=torch.float64), Normal(torch.zeros(Z).double(), 1), []
        for t in range(length):
            x = trials.inputs[t, n] @ params["encoder.embedding.kernel"] + params["encoder.embedding.bias"]
            _, state = gru_step(params, torch.relu(x), state)
            outputs = state @ params["encoder.posterior.kernel"] + params["encoder.posterior.bias"]
            posterior = Normal(outputs[:Z], outputs[Z:].exp())
            found.append((posterior, kl_divergence(posterior, before).sum()))
            before = posterior
        which = range(length) if at is None else at[:, n].tolist()
        for k, t in enumerate(which):
            posterior, kl = found[t]
            m = posterior.mean + posterior.stddev * noise[k, n]
            behind = [*range(length)] if decoded_at is None else decoded_at[n].tolist()
            likelihood = sum(decoded(settings, params, m, trials.steps, n, d) for d in behind) * length / len(behind)
            total = total + torch.cat([likelihood, kl[None]]) / len(which) / len(trials.lengths)
    return total


@pytest.mark.parametrize("drawn", ["all", "some"])
@of_kinds
def test_value_and_gradient_are_those_of_the_bound_written_out_step_by_step(settings, drawn):
    encoder, decoders, params, trials, noise = toy(settings)
    at = decoded_at = None
    if drawn == "some":
        at, decoded_at, noise = torch.tensor([[4, 0, 3], [1, 1, 2]]), torch.tensor([[3, 3], [0, 1], [2, 0]]), noise[:2]
    found = torch.stack(elbo(encoder, decoders, params, trials, RandomDraws(at, decoded_at, noise)))
    expected = unrolled(settings, params, trials, noise, at, decoded_at)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    weights = torch.tensor([1.0, 0.7, -0.3], dtype=torch.float64)
    gradients = [torch.autograd.grad(value @ weights, [*params.values()]) for value in (found, expected)]
    for name, gradient, other in zip(params, *gradients, strict=True):
        assert other.abs().max() > 0, name
        torch.testing.assert_close(gradient, other, rtol=1e-8, atol=1e-11)


@of_kinds
def test_few_decoded_steps_are_all_of_them_in_the_mean(settings):
    encoder, decoders, params, trials, noise = toy(settings, lengths=(4, 4))
    every = torch.stack(elbo(encoder, decoders, params, trials, RandomDraws(None, None, noise)))
    single = [
        torch.stack(elbo(encoder, decoders, params, trials, RandomDraws(None, torch.full((2, 1), d), noise)))
        for d in range(4)
    ]
    torch.testing.assert_close(torch.stack(single).mean(0), every)


@of_kinds
def test_few_posteriors_are_all_of_them_in_the_mean(settings):
    encoder, decoders, params, trials, noise = toy(settings, lengths=(4, 4))
    every = torch.stack(elbo(encoder, decoders, params, trials, RandomDraws(None, None, noise)))
    single = [
        torch.stack(elbo(encoder, decoders, params, trials, RandomDraws(torch.full((1, 2), t), None, noise[t : t + 1])))
        for t in range(4)
    ]
    torch.testing.assert_close(torch.stack(single).mean(0), every)


def test_a_posterior_knows_the_past_of_its_own_trial_and_nothing_else():
    encoder, _, params, trials, _ = toy(KINDS["gaussian"])
    before = encoder.posteriors(params, trials.inputs)
    inputs = trials.inputs.clone()
    inputs[2:, 1] += 1  # steps 2 on of trial 1
    after = encoder.posteriors(params, inputs)
    for name in ("mean", "log_std"):
        changed = (getattr(before, name) != getattr(after, name)).any(-1)
        assert torch.equal(changed, torch.arange(L)[:, None].ge(2) & torch.arange(N).eq(1))


@of_kinds
def test_what_lies_behind_a_trials_end_changes_nothing(settings):
    encoder, decoders, params, trials, noise = toy(settings)
    expected = elbo(encoder, decoders, params, trials, RandomDraws(None, None, noise))
    inputs, steps = trials.inputs.clone(), {name: value.clone() for name, value in vars(trials.steps).items()}
    inputs[LENGTHS[1] :, 1] = 9.0
    for value in steps.values():
        value[1, LENGTHS[1] :] = 9.0
    found = elbo(
        encoder,
        decoders,
        params,
        TrialTensors(inputs, DecodedSteps(**steps), trials.lengths),
        RandomDraws(None, None, noise),
    )
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-12, atol=0)


def test_a_reward_of_zero_is_as_little_a_success_as_a_negative_one():
    encoder, decoders, params, trials, noise = toy(KINDS["bernoulli"])
    found = []
    for reward in (-1, 0, 1):
        trials.steps.rewards[:] = reward
        found.append(elbo(encoder, decoders, params, trials, RandomDraws(None, None, noise)).rewards.item())
    assert found[0] == found[1] != found[2]


def test_later_rewards_count_for_an_early_posterior():
    encoder, decoders, params, trials, noise = toy(KINDS["bernoulli"])
    first = RandomDraws(torch.zeros(1, N, dtype=torch.int64), None, noise[:1])
    before = elbo(encoder, decoders, params, trials, first).rewards
    trials.steps.rewards[0, L - 1] *= -1  # of the last step; the encoder's inputs stay
    assert elbo(encoder, decoders, params, trials, first).rewards.item() != before.item()
