"""ReLU networks: how they start, and their derivatives against torch."""

import numpy as np
import pytest
import torch

from metaloom.pipeline.algorithms.pearl.networks import Activations, Network, initialize_relu

SIZES = (4, 6, 5, 1)


@pytest.fixture
def network():
    params = initialize_relu(4, (6, 5), 1, np.random.default_rng(0), output_limit=0.5)
    return Network({name: value.astype(np.float64) for name, value in params.items()})


@pytest.fixture
def inputs():
    return np.random.default_rng(1).standard_normal((9, 4))


def with_inputs(network, inputs):
    activations = Activations(network.sizes, len(inputs), inputs.dtype)
    activations.inputs[:] = inputs
    return activations


def torch_outputs(network, inputs):
    x = inputs
    for i, layer in enumerate(torch.tensor(layer) for layer in network.layers):
        x = x @ layer[:-1] + layer[-1]
        if i < len(network.layers) - 1:
            x = x.relu()
    return x


def test_hidden_kernels_are_scaled_by_the_units_a_layer_hears_from():
    params = initialize_relu(400, (4, 300), 2, np.random.default_rng(0), output_limit=3e-3)
    for name, limit in (("hidden_0", 1 / 20), ("hidden_1", 1 / 2), ("output", 3e-3)):
        largest = np.abs(params[f"{name}.kernel"]).max()
        assert 0.98 * limit < largest <= limit, name
    assert (params["hidden_0.bias"] == np.float32(0.1)).all()
    assert 0 < np.abs(params["output.bias"]).max() <= 3e-3


def test_parameters_come_out_as_they_went_in(network):
    params = initialize_relu(4, (6, 5), 1, np.random.default_rng(0), output_limit=0.5)
    assert network.sizes == SIZES
    out = network.params()
    assert list(out) == list(params)
    for name, value in params.items():
        np.testing.assert_array_equal(out[name], value)
        assert not np.shares_memory(out[name], network.vector)


def test_outputs_are_those_of_torch(network, inputs):
    activations = with_inputs(network, inputs)
    expected = torch_outputs(network, torch.tensor(inputs))
    for _ in range(2):  # buffers are used again
        np.testing.assert_allclose(activations.forward(network.layers), expected.numpy(), rtol=1e-12)


def test_gradients_are_those_of_autograd(network, inputs):
    activations = with_inputs(network, inputs)
    activations.forward(network.layers)
    weights = np.arange(9.0)[:, None]
    gradients = network.views(network.gradient)
    activations.backward(network.layers, weights, gradients)

    x = torch.tensor(inputs, requires_grad=True)
    layers = [torch.tensor(layer, requires_grad=True) for layer in network.layers]
    h = x
    for layer in layers[:-1]:
        h = (h @ layer[:-1] + layer[-1]).relu()
    ((h @ layers[-1][:-1] + layers[-1][-1]) * torch.tensor(weights)).sum().backward()
    for found, layer in zip(gradients, layers, strict=True):
        np.testing.assert_allclose(found, layer.grad.numpy(), rtol=1e-10, atol=1e-12)
    found = activations.input_errors(network.layers, slice(1, 3))
    np.testing.assert_allclose(found, x.grad[:, 1:3].numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", [[], [0, 3, 8], list(range(9))])
def test_slopes_of_some_rows_are_those_of_autograd(network, inputs, rows):
    activations = with_inputs(network, inputs)
    activations.forward(network.layers)
    x = torch.tensor(inputs, requires_grad=True)
    torch_outputs(network, x).sum().backward()
    found = activations.slopes(network.layers, np.array(rows, np.int64), slice(0, 2))
    np.testing.assert_allclose(found, x.grad[rows, :2].numpy(), rtol=1e-10, atol=1e-12)
