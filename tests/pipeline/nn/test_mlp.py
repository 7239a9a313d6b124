import numpy as np
import pytest
import torch

from metaloom.pipeline.nn.networks import build_network
from metaloom.pipeline.nn.spec import NetworkSpec

MLP = build_network("net", NetworkSpec("mlp", (3,), 2, (5, 4)))


@pytest.fixture
def params():
    return MLP.initialize(np.random.default_rng(0))


def tensors(params, dtype=torch.float64):
    return {name: torch.from_numpy(value).to(dtype) for name, value in params.items()}


def test_names_and_shapes_follow_the_layers(params):
    assert {name: value.shape for name, value in params.items()} == {
        "net.hidden_0.kernel": (3, 5),
        "net.hidden_0.bias": (5,),
        "net.hidden_1.kernel": (5, 4),
        "net.hidden_1.bias": (4,),
        "net.output.kernel": (4, 2),
        "net.output.bias": (2,),
    }
    assert list(params)[-1] == "net.output.bias"
    assert all(value.dtype == np.float32 for value in params.values())


@pytest.mark.parametrize("network", ["mlp", "residual"])
def test_without_hidden_layers_a_network_is_linear(network):
    linear = build_network("net", NetworkSpec(network, (3,), 2, (), "tanh"))
    assert linear.shapes == {"net.output.kernel": (3, 2), "net.output.bias": (2,)}
    params = {"net.output.kernel": np.array([[1, 2], [3, 4], [5, 6.0]]), "net.output.bias": np.array([0.5, -0.5])}
    assert linear(tensors(params), torch.tensor([[1, 0, -1.0], [10, 20, 30]], dtype=torch.float64)).tolist() == [
        [-3.5, -4.5],
        [220.5, 279.5],
    ]


def test_kernels_fill_the_glorot_interval_and_biases_are_zero():
    params = build_network("net", NetworkSpec("mlp", (200,), 1, (100,))).initialize(np.random.default_rng(0))
    limit = np.sqrt(6 / 300)
    kernel = params["net.hidden_0.kernel"]
    assert 0.99 * limit < abs(kernel).max() <= limit
    assert kernel.var() == pytest.approx(limit**2 / 3, rel=0.05)
    assert not params["net.hidden_0.bias"].any()


def test_output_is_that_of_torch_layers(params):
    inputs = torch.randn(7, 3, dtype=torch.float64)
    p = tensors(params)
    p["net.output.bias"] += 0.5
    hidden = torch.tanh(inputs @ p["net.hidden_0.kernel"] + p["net.hidden_0.bias"])
    hidden = torch.tanh(hidden @ p["net.hidden_1.kernel"] + p["net.hidden_1.bias"])
    expected = hidden @ p["net.output.kernel"] + p["net.output.bias"]
    torch.testing.assert_close(MLP(p, inputs), expected)


def test_a_task_axis_computes_every_task_with_its_own_parameters(params):
    rng = np.random.default_rng(1)
    batched = {name: rng.standard_normal((4, *value.shape)) for name, value in params.items()}
    inputs = torch.from_numpy(rng.standard_normal((4, 6, 3)))
    found = MLP(tensors(batched), inputs)
    for b in range(4):
        alone = MLP(tensors({name: value[b] for name, value in batched.items()}), inputs[b])
        torch.testing.assert_close(found[b], alone)


def test_inputs_are_left_alone(params):
    inputs = torch.randn(7, 3)
    before = inputs.clone()
    MLP(tensors(params, torch.float32), inputs)
    assert torch.equal(inputs, before)


def test_first_and_second_derivatives_agree_with_finite_differences(params):
    inputs = torch.randn(2, 4, 3, dtype=torch.float64)
    names = list(params)
    values = [tensors(params)[name].expand(2, *params[name].shape).clone().requires_grad_() for name in names]

    def output(*values):
        return MLP(dict(zip(names, values, strict=True)), inputs)

    assert torch.autograd.gradcheck(output, values)
    assert torch.autograd.gradgradcheck(output, values)
