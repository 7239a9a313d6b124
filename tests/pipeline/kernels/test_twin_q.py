"""Two Q-functions: independent, differentiated as autograd does it, followed where each is the smaller."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from metaloom.pipeline.kernels.sac import TwinQKernel
from metaloom.pipeline.nn.networks import build_network
from metaloom.pipeline.nn.spec import NetworkSpec

O, A, N = 3, 2, 8
RNG = np.random.default_rng(2)
SPEC = NetworkSpec("mlp", (O,), 1, (6, 5), "relu", extra_size=A)
NETWORKS = [build_network(name, SPEC) for name in ("q1", "q2")]
PARAMS = {name: value for network in NETWORKS for name, value in network.initialize(RNG).items()}
INPUTS = RNG.normal(size=(N, O + A)).astype(np.float32)


def reference(inputs):
    params = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in PARAMS.items()}
    leaf = torch.tensor(inputs, dtype=torch.float64, requires_grad=True)
    return params, leaf, torch.stack([network(params, leaf)[:, 0] for network in NETWORKS])


def values_of(twins):
    return twins.values(INPUTS[:, :O], INPUTS[:, O:])


def test_the_two_differ_from_the_start():
    first, second = values_of(TwinQKernel(PARAMS, SPEC))
    assert (first != second).all()


def test_values_and_parameter_gradients_are_those_of_autograd():
    twins = TwinQKernel(PARAMS, SPEC)
    pull = RNG.normal(size=(2, N)).astype(np.float32)
    found = values_of(twins)
    twins.backward(pull)
    params, _, expected = reference(INPUTS)
    np.testing.assert_allclose(found, expected.detach(), rtol=1e-4, atol=1e-6)
    gradients = torch.autograd.grad((expected * torch.tensor(pull)).sum(), list(params.values()))
    for name, gradient in zip(params, gradients, strict=True):
        np.testing.assert_allclose(twins.gradients[name], gradient, rtol=1e-4, atol=1e-5)


def test_the_gradient_to_the_actions_goes_through_the_smaller_of_the_two():
    twins = TwinQKernel(PARAMS, SPEC)
    values = values_of(twins)
    assert 0 < (values[0] < values[1]).sum() < N  # both are needed
    _, leaf, expected = reference(INPUTS)
    (gradient,) = torch.autograd.grad(expected.amin(0).sum(), leaf, retain_graph=True)
    found = twins.gradient_of_smaller(values, slice(O, None))
    np.testing.assert_allclose(found, gradient[:, O:], rtol=1e-4, atol=1e-6)
    # Neither network may be the smaller one anywhere; where both are equal, it is the first.
    everywhere = twins.gradient_of_smaller(np.stack([values[0], values[0]]))
    np.testing.assert_allclose(everywhere, torch.autograd.grad(expected[0].sum(), leaf)[0], rtol=1e-4, atol=1e-6)


def test_threads_change_no_bit():
    with ThreadPoolExecutor(2) as pool:
        results = []
        for parallel in (map, pool.map):
            twins = TwinQKernel(PARAMS, SPEC, parallel=parallel)
            values = values_of(twins)
            twins.backward(values)
            results.append((values, twins.gradient.copy(), twins.gradient_of_smaller(values)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
