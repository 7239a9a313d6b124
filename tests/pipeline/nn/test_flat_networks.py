"""Networks on one vector: outputs and all derivatives against autograd in float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from metaloom.pipeline.nn.flat_networks import FlatNetwork, FlatParams, renamed
from metaloom.pipeline.nn.spec import layer_paths

RNG = np.random.default_rng(3)
N = 6
LAYERS = ["a", "b", "c"]


def numbers(*shape):
    return RNG.normal(size=shape).astype(np.float32)


class Reference:
    """A network with random parameters beside the same one under autograd."""

    def __init__(self, activation, fold_bias=False):
        self.params = {}
        for layer, (rows, columns) in zip(LAYERS, pairwise([3, 5, 4, 2]), strict=True):
            self.params |= {f"{layer}.kernel": numbers(rows, columns), f"{layer}.bias": numbers(columns)}
        self.flat = FlatParams(self.params)
        self.network = FlatNetwork(self.flat, LAYERS, activation, fold_bias=fold_bias)
        self._act = {"tanh": torch.tanh, "relu": torch.relu}[activation]
        self.leaves = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in self.params.items()}

    def __call__(self, inputs):
        """Outputs, and the inputs as a leaf."""
        leaf = torch.tensor(inputs, dtype=torch.float64, requires_grad=True)
        x = leaf
        for layer in LAYERS:
            x = x @ self.leaves[f"{layer}.kernel"] + self.leaves[f"{layer}.bias"]
            x = x if layer == LAYERS[-1] else self._act(x)
        return x, leaf


@pytest.fixture(params=[("tanh", False), ("relu", False), ("relu", True)], ids=["tanh", "relu", "folded"])
def reference(request):
    return Reference(*request.param)


def test_outputs_and_gradients_are_those_that_autograd_finds(reference):
    inputs, pull = numbers(N, 3), numbers(N, 2)
    outputs = reference.network.forward(inputs)
    to_inputs = reference.network.input_gradient(pull, write=True)
    expected, leaf = reference(inputs)
    np.testing.assert_allclose(outputs, expected.detach(), rtol=1e-4, atol=1e-5)
    wanted = [leaf, *reference.leaves.values()]
    found = [to_inputs, *(reference.flat.gradients[name] for name in reference.leaves)]
    for one, other in zip(found, torch.autograd.grad((expected * torch.tensor(pull)).sum(), wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_the_gradient_to_some_columns_of_some_rows_leaves_the_parameters_gradient_alone(reference):
    inputs, pull, rows = numbers(N, 3), numbers(2, 2), np.array([4, 1])
    reference.network.forward(inputs)
    reference.flat.gradient[:] = 7
    found = reference.network.input_gradient(pull, slice(1, None), rows)
    assert (reference.flat.gradient == 7).all()
    expected, leaf = reference(inputs)
    (whole,) = torch.autograd.grad((expected[rows] * torch.tensor(pull)).sum(), leaf)
    np.testing.assert_allclose(found, whole[rows, 1:], rtol=1e-4, atol=1e-6)


def test_all_rows_and_all_columns_are_what_the_input_gradient_means_by_itself(reference):
    inputs, pull = numbers(N, 3), numbers(N, 2)
    reference.network.forward(inputs)
    whole = reference.network.input_gradient(pull, write=True)
    np.testing.assert_array_equal(reference.network.input_gradient(pull), whole)
    np.testing.assert_array_equal(reference.network.input_gradient(pull, slice(0, 2), write=True), whole[:, :2])


def test_the_gradient_of_the_first_rows_is_that_of_a_batch_of_them(reference):
    inputs, pull = numbers(N, 3), numbers(2, 2)
    reference.network.forward(inputs)
    reference.network.backward(pull, slice(0, 2))
    some = reference.flat.gradient.copy()
    reference.network.forward(inputs[:2])
    reference.network.backward(pull)
    np.testing.assert_allclose(some, reference.flat.gradient, rtol=1e-5, atol=1e-6)


def test_outputs_survive_the_next_call_and_fewer_rows_after_more_are_right(reference):
    more, fewer = numbers(N, 3), numbers(2, 3)
    first = reference.network.forward(more)
    before = first.copy()
    second = reference.network.forward(fewer)
    np.testing.assert_array_equal(first, before)
    np.testing.assert_allclose(second, reference(fewer)[0].detach(), rtol=1e-4, atol=1e-5)


def test_inputs_are_joined_and_no_rows_have_no_gradient(reference):
    inputs = numbers(N, 3)
    joined = reference.network.forward(inputs[:, :1], inputs[:, 1:])
    np.testing.assert_allclose(joined, reference(inputs)[0].detach(), rtol=1e-4, atol=1e-5)
    assert reference.network.input_gradient(numbers(0, 2), rows=np.zeros(0, np.int64)).shape == (0, 3)


def test_networks_on_the_same_parameters_have_gradients_of_their_own(reference):
    inputs, pull = numbers(N, 3), numbers(N, 2)
    first, second = (reference.flat.with_own_gradient() for _ in range(2))
    for flat, weight in ((first, 1), (second, 2)):
        network = FlatNetwork(flat, LAYERS, "relu", fold_bias=True)
        network.forward(inputs)
        network.backward(weight * pull)
    np.testing.assert_array_equal(2 * first.gradient, second.gradient)
    assert not reference.flat.gradient.any()
    assert first.vector is reference.flat.vector


def test_a_bias_is_folded_only_where_a_one_stays_one_and_behind_its_kernel():
    params = {"a.bias": numbers(2), "a.kernel": numbers(3, 2)}
    with pytest.raises(ValueError, match=r"a\.bias does not follow a\.kernel"):
        FlatNetwork(FlatParams(params), ["a"], "relu", fold_bias=True)
    with pytest.raises(ValueError, match="fold_bias requires relu"):
        FlatNetwork(FlatParams(params), ["a"], "tanh", fold_bias=True)


def test_names_get_a_prefix_and_lose_it():
    arrays = {"x": np.zeros(1), "y.z": np.ones(1)}
    assert list(renamed(arrays, "", "q.")) == ["q.x", "q.y.z"]
    assert renamed(renamed(arrays, "", "q.") | renamed(arrays, "", "qq."), "q.", "") == arrays
    assert layer_paths("q", 1) == ("q.hidden_0", "q.output")


def test_a_long_gradient_is_shortened_and_its_norm_is_the_one_before():
    flat = FlatParams({"x": np.zeros(2, np.float32)})
    flat.gradient[:] = [3, 4]
    assert flat.clip_gradient(None) == 5
    assert flat.clip_gradient(10) == 5
    assert flat.clip_gradient(1) == 5
    np.testing.assert_allclose(flat.gradient, [0.6, 0.8], rtol=1e-6)
