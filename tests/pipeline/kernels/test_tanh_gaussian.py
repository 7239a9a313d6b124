"""The squashed Gaussian: densities against the density's definition, derivatives against autograd."""

import math

import numpy as np
import pytest
import torch

from metaloom.pipeline.algorithms.off_policy.parts import sample
from metaloom.pipeline.kernels.sac import TanhGaussianActions

RNG = np.random.default_rng(5)
N, A = 7, 2


def numbers(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def test_log_density_by_hand():
    # mean 0, std 1, noise 0: u = 0, a = 0, no squashing there, so the density is that of the Gaussian at its mean.
    sample = TanhGaussianActions(np.zeros((1, 4), np.float32), np.zeros((1, 2), np.float32))
    assert sample.actions.tolist() == [[0, 0]]
    assert sample.log_prob[0] == pytest.approx(-math.log(2 * math.pi))
    # mean 0.5, std e^-1, noise 1: u = 0.5 + e^-1.
    sample = TanhGaussianActions(np.array([[0.5, -1]], np.float32), np.ones((1, 1), np.float32))
    a = math.tanh(0.5 + math.exp(-1))
    expected = -0.5 + 1 - 0.5 * math.log(2 * math.pi) - math.log(1 - a**2)
    assert sample.actions[0, 0] == pytest.approx(a)
    assert sample.log_prob[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -0.5), (-1.2, 0.4)])
def test_densities_integrate_to_one_and_their_mean_log_is_minus_the_entropy(mean, log_std):
    # Over u, where density and log-density of the action are functions of the noise.
    noise = np.linspace(-8, 8, 20001).astype(np.float32)[:, None]
    outputs = np.tile(np.array([mean, log_std], np.float32), (len(noise), 1))
    sample = TanhGaussianActions(outputs, noise)
    a, density = sample.actions[:, 0].astype(np.float64), np.exp(sample.log_prob.astype(np.float64))
    assert np.trapezoid(density, a) == pytest.approx(1, abs=1e-3)
    # H(tanh u) = H(u) + E log(1 - tanh² u), and 1 - tanh² = 1 / cosh².
    z, weights = np.polynomial.hermite_e.hermegauss(80)
    log_slopes = -2 * np.log(np.cosh(mean + math.exp(log_std) * z))
    entropy = 0.5 * math.log(2 * math.pi * math.e) + log_std + (weights * log_slopes).sum() / weights.sum()
    sampled = TanhGaussianActions(np.tile(outputs[:1], (len(z), 1)), z[:, None].astype(np.float32)).log_prob
    assert -(weights * sampled).sum() / weights.sum() == pytest.approx(entropy, abs=1e-5)


def test_far_out_the_log_density_is_exact_where_one_minus_the_square_is_zero():
    u = 20.0
    sample = TanhGaussianActions(np.array([[u, 0]], np.float32), np.zeros((1, 1), np.float32))
    assert sample.actions[0, 0] == 1
    # 1 - tanh² u = 4 e^(-2u) / (1 + e^(-2u))² is 4 e^(-2u) to double precision.
    assert sample.log_prob[0] == pytest.approx(-0.5 * math.log(2 * math.pi) + 2 * u - math.log(4), rel=1e-6)


def test_the_definition_has_the_density_that_torch_knows():
    outputs, noise = torch.tensor(numbers(N, 2 * A)), torch.tensor(numbers(N, A))
    found = sample(outputs.double(), noise.double())
    gaussian = torch.distributions.Normal(found.mean, found.log_std.exp())
    squash = torch.distributions.TanhTransform(cache_size=1)
    squashed = torch.distributions.TransformedDistribution(gaussian, squash)
    np.testing.assert_allclose(found.actions, squash(found.u), rtol=1e-12)
    np.testing.assert_allclose(found.log_prob, squashed.log_prob(squash(found.u)).sum(-1), rtol=1e-10)


def test_the_kernels_derivatives_are_those_of_the_definition():
    outputs, noise, pull, weights = numbers(N, 2 * A), numbers(N, A), numbers(N, A), numbers(N, 1)
    outputs[0, A:] = [-25, 3]  # outside the clamp
    outputs = outputs.astype(np.float64)
    leaf = torch.tensor(outputs, requires_grad=True)
    expected = sample(leaf, torch.tensor(noise, dtype=torch.float64))
    loss = (expected.actions * torch.tensor(pull)).sum() + (expected.log_prob[:, None] * torch.tensor(weights)).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    found = TanhGaussianActions(outputs, noise)
    np.testing.assert_allclose(found.actions, expected.actions.detach(), rtol=1e-10)
    np.testing.assert_allclose(found.log_prob, expected.log_prob.detach(), rtol=1e-10)
    np.testing.assert_allclose(found.backward(pull, weights), gradient, rtol=1e-10, atol=1e-12)
    assert (gradient[0, A:] == 0).all()
    np.testing.assert_allclose(found.backward(pull, 0.3), found.backward(pull, np.full((N, 1), 0.3)), rtol=1e-12)
