"""Posteriors over latent variables, against closed forms and the definition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from metaloom.pipeline.algorithms.pearl import learner
from metaloom.pipeline.kernels.pearl import GaussianProduct, Point, PosteriorArrays

factors = st.integers(1, 12).flatmap(lambda C: arrays(np.float64, (2, C, 4), elements=st.floats(-5, 5)))


def softplus(x):
    return np.log1p(np.exp(x))


@given(factors)
def test_the_product_is_bayes_rule_one_transition_after_the_other(outputs):
    belief = GaussianProduct().infer(outputs)
    mean, variance = outputs[:, 0, :2], softplus(outputs[:, 0, 2:])
    for n in range(1, outputs.shape[1]):
        seen, noise = outputs[:, n, :2], softplus(outputs[:, n, 2:])
        gain = variance / (variance + noise)
        mean, variance = mean + gain * (seen - mean), (1 - gain) * variance
    np.testing.assert_allclose(belief.mean, mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(belief.variance, variance, rtol=1e-9)


@given(factors, st.randoms(use_true_random=False))
def test_the_order_of_the_context_does_not_matter(outputs, random):
    order = random.sample(range(outputs.shape[1]), outputs.shape[1])
    for posterior, values in ((GaussianProduct(), outputs), (Point(), outputs)):
        belief, permuted = posterior.infer(values), posterior.infer(values[:, order])
        np.testing.assert_allclose(belief.mean, permuted.mean, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(belief.variance, permuted.variance, rtol=1e-9)


def test_one_transition_is_believed_as_it_is():
    belief = GaussianProduct().infer(np.array([[[0.5, 0.0]]]))
    assert belief.mean.item() == pytest.approx(0.5)
    assert belief.variance.item() == pytest.approx(np.log(2))


def test_the_variance_is_that_of_one_transition_divided_by_their_number():
    belief = GaussianProduct().infer(np.tile([0.5, 0.0], (1, 10, 1)))
    assert belief.mean.item() == pytest.approx(0.5)
    assert belief.variance.item() == pytest.approx(np.log(2) / 10)


def test_no_transition_is_believed_more_than_a_variance_of_1e_7_allows():
    belief = GaussianProduct().infer(np.array([[[1.0, -100.0], [3.0, -200.0]]]))
    assert belief.mean.item() == pytest.approx(2)
    assert belief.variance.item() == pytest.approx(0.5e-7)


def test_kl_is_that_of_torch(rng_outputs):
    kernel, found = GaussianProduct(), learner.posterior(torch.tensor(rng_outputs))
    kernel.infer(rng_outputs)
    q = torch.distributions.Normal(found.mean, found.variance.sqrt())
    kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum(-1)
    np.testing.assert_allclose(found.kl().numpy(), kl.numpy(), rtol=1e-10)
    np.testing.assert_allclose(kernel.kl(), kl.numpy(), rtol=1e-10)


def test_kl_of_the_prior_is_zero():
    posterior = GaussianProduct()
    posterior.infer(np.array([[[0.0, np.log(np.e - 1)]]]))  # softplus gives 1
    assert posterior.kl().item() == pytest.approx(0, abs=1e-12)


@pytest.fixture
def rng_outputs():
    return np.random.default_rng(0).standard_normal((3, 5, 4)) * 2


@pytest.mark.parametrize("kl_weight", [0.0, 0.7])
def test_the_gradient_is_that_of_autograd_with_a_clamped_variance_too(rng_outputs, kl_weight):
    rng_outputs[1, 2, 3] = -30.0  # its variance is below the least
    noise, slopes = np.random.default_rng(1).standard_normal((2, 3, 2))
    posterior = GaussianProduct()
    posterior.infer(rng_outputs)
    found = posterior.backward(slopes, noise, kl_weight)

    outputs = torch.tensor(rng_outputs, requires_grad=True)
    expected = learner.posterior(outputs)
    z = expected.mean + expected.variance.sqrt() * torch.tensor(noise)
    ((z * torch.tensor(slopes)).sum() + kl_weight * expected.kl().sum()).backward()
    np.testing.assert_allclose(found, outputs.grad.numpy(), rtol=1e-10, atol=1e-12)
    assert found[1, 2, 3] == 0


def test_without_the_bottleneck_z_is_the_mean_and_nothing_is_drawn(rng_outputs):
    point = Point()
    belief = point.infer(rng_outputs)
    np.testing.assert_allclose(belief.sample(np.full((3, 4), 9.0)), rng_outputs.mean(1))
    assert not belief.variance.any()
    assert not point.kl().any()
    slopes = np.arange(12.0).reshape(3, 4)
    found = point.backward(slopes, np.full((3, 4), 9.0), 0.5)
    np.testing.assert_allclose(found, np.repeat(slopes[:, None] / 5, 5, axis=1))


def test_samples_have_the_beliefs_mean_and_variance():
    belief = PosteriorArrays(np.array([[1.0]]), np.array([[4.0]]))
    np.testing.assert_array_equal([belief.sample(np.array([[e]])).item() for e in (-1.0, 0.0, 1.0)], [-1, 1, 3])
