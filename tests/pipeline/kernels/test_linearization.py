"""Derivatives of a linearized network against automatic differentiation, in float64."""

import numpy as np
import pytest
import torch

from metaloom.pipeline.nn.linearization import LinearizedMLP, PulledBack
from metaloom.pipeline.nn.networks import build_network
from metaloom.pipeline.nn.spec import NetworkSpec

B, N, IN, OUT = 2, 7, 3, 2


@pytest.fixture(params=["tanh", "relu"])
def activate(request):
    return request.param


@pytest.fixture(params=[(), (4,), (5, 4), (3, 4, 5)], ids=str)
def case(request, activate):
    rng = np.random.default_rng(0)
    params = {}
    for name, value in build_network("net", NetworkSpec("mlp", (IN,), OUT, request.param)).initialize(rng).items():
        params[name] = 0.5 * rng.standard_normal((B, *value.shape))
    tangents = {name: rng.standard_normal(value.shape) for name, value in params.items()}
    return len(request.param), activate, params, tangents, rng


def functional(num_hidden, activate, params, inputs):
    """The network as a function of its parameters in order, and these."""
    values = tuple(torch.from_numpy(value) for value in params.values())

    def network(*leaves):
        named = dict(zip(params, leaves, strict=True))
        spec = NetworkSpec("mlp", (IN,), OUT, (1,) * num_hidden, activate)
        return build_network("net", spec)(named, torch.from_numpy(inputs))

    return network, values


def assert_equal(found, expected):
    for (name, value), other in zip(found.items(), expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-10, atol=1e-12, err_msg=name)


def test_outputs_and_directional_derivatives_are_those_of_the_network(case):
    num_hidden, activate, params, tangents, rng = case
    inputs = rng.standard_normal((B, N, IN))
    network, values = functional(num_hidden, activate, params, inputs)
    linearized = LinearizedMLP("net", num_hidden, params, inputs, activate)
    directions = tuple(torch.from_numpy(value) for value in tangents.values())
    outputs, pushed = torch.autograd.functional.jvp(network, values, directions)
    np.testing.assert_allclose(linearized.outputs, outputs, rtol=1e-12)
    np.testing.assert_allclose(linearized.push(tangents)[-1], pushed, rtol=1e-10, atol=1e-12)


def test_the_pull_of_a_cotangent_is_the_gradient(case):
    num_hidden, activate, params, _, rng = case
    inputs, cotangent = rng.standard_normal((B, N, IN)), rng.standard_normal((B, N, OUT))
    network, values = functional(num_hidden, activate, params, inputs)
    linearized = LinearizedMLP("net", num_hidden, params, inputs, activate)
    _, expected = torch.autograd.functional.vjp(network, values, torch.from_numpy(cotangent))
    for found in (linearized.pull(cotangent), PulledBack(linearized, cotangent).gradients):
        assert_equal({name: found[name] for name in params}, expected)


def test_the_derivative_of_a_pull_is_the_hessian_times_the_direction(case):
    # The cotangent of Σ f(outputs) is f'(outputs); it moves with the outputs by f''.
    num_hidden, activate, params, tangents, rng = case
    inputs = rng.standard_normal((B, N, IN))
    network, values = functional(num_hidden, activate, params, inputs)
    linearized = LinearizedMLP("net", num_hidden, params, inputs, activate)
    pushed = linearized.push(tangents)
    outputs = linearized.outputs
    pulled = PulledBack(linearized, np.cos(outputs))
    found = pulled.differentiate(tangents, pushed, -np.sin(outputs) * pushed[-1])
    directions = tuple(torch.from_numpy(value) for value in tangents.values())
    _, expected = torch.autograd.functional.hvp(lambda *leaves: network(*leaves).sin().sum(), values, directions)
    assert_equal({name: found[name] for name in params}, expected)


def test_products_leave_what_they_are_given_alone(case):
    num_hidden, activate, params, tangents, rng = case
    inputs, cotangent = rng.standard_normal((B, N, IN)), rng.standard_normal((B, N, OUT))
    for value in (*params.values(), *tangents.values(), inputs, cotangent):
        value.flags.writeable = False
    linearized = LinearizedMLP("net", num_hidden, params, inputs, activate)
    pulled = PulledBack(linearized, cotangent)
    results = []
    for _ in range(2):
        pushed = linearized.push(tangents)
        results.append(pulled.differentiate(tangents, pushed, cotangent) | linearized.pull(cotangent))
    for name, value in results[0].items():
        np.testing.assert_array_equal(results[1][name], value)
