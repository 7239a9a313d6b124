"""Optimizers on one vector: those of torch, with a state of plain arrays that any later process goes on from."""

import numpy as np
import pytest
import torch

from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.nn.optimization import OptimizerConfig
from metaloom.pipeline.nn.optimizers import IN_PLACE
from metaloom.pipeline.nn.torch_optimizers import initial_state, vector_optimizer

RNG = np.random.default_rng(0)
PARAMS = {"a": RNG.normal(size=(3, 2)).astype(np.float32), "b": RNG.normal(size=4).astype(np.float32)}
GRADIENTS = RNG.normal(size=(6, 10)).astype(np.float32)

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-5),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_torchs_though_every_one_goes_on_from_stored_arrays(name):
    config = OptimizerConfig(name=name, options={"momentum": 0.9} if name == "sgd" else {})
    flat, state = FlatTensors(PARAMS), initial_state(config, PARAMS)
    reference = flat.vector.clone().requires_grad_()
    optimizer = OPTIMIZERS[name]([reference])
    for gradient in GRADIENTS:
        ours = vector_optimizer(config, flat.vector, state)
        ours.step(torch.tensor(gradient), 0.01)
        state = ours.state
        reference.grad = torch.tensor(gradient)
        optimizer.step()
    torch.testing.assert_close(flat.vector, reference.detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(flat.copies()["a"], flat.vector.numpy()[:6].reshape(3, 2))
    assert state.keys() == initial_state(config, PARAMS).keys()
    assert {key: value.shape for key, value in state.items()} == {
        key: value.shape for key, value in initial_state(config, PARAMS).items()
    }


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_state_is_the_kernels_too(name):
    config = OptimizerConfig(name=name)
    flat, vector = FlatTensors(PARAMS), FlatTensors(PARAMS).vector.numpy()
    state = initial_state(config, PARAMS)
    kernel, ours = IN_PLACE[name].of(state), vector_optimizer(config, flat.vector, state)
    for gradient in GRADIENTS:
        kernel.step(vector, gradient, 0.01)
        ours.step(torch.tensor(gradient), 0.01)
    np.testing.assert_allclose(flat.vector, vector, rtol=1e-5, atol=1e-6)
    assert kernel.state.keys() == ours.state.keys()
    for key, value in kernel.state.items():
        assert value.dtype == ours.state[key].dtype
        np.testing.assert_allclose(ours.state[key], value, rtol=1e-5, atol=1e-6)


def test_adam_with_options_keeps_the_epsilon_that_is_customary_here():
    betas = OptimizerConfig(name="adam", options={"betas": [0.5, 0.9]})
    flat = FlatTensors(PARAMS)
    reference = flat.vector.clone().requires_grad_()
    vector_optimizer(betas, flat.vector, initial_state(betas, PARAMS)).step(torch.full((10,), 1e-5), 0.01)
    reference.grad = torch.full((10,), 1e-5)
    torch.optim.Adam([reference], lr=0.01, betas=(0.5, 0.9), eps=1e-5).step()
    torch.testing.assert_close(flat.vector, reference.detach())


def test_an_optimizer_that_torch_does_not_have_is_refused():
    refusal = r"^algorithm.optimizer: torch \S+ has no torch.optim.Adamm; use one of .*; did you mean Adam\?$"
    with pytest.raises(ConfigError, match=refusal):
        initial_state(OptimizerConfig(name="Adamm"), PARAMS)


def test_gradients_lie_in_one_vector_and_what_is_not_learned_has_none():
    flat = FlatTensors(PARAMS, learned=("a",))
    for _ in range(2):  # the second pass does not add to the first
        flat.gradient.zero_()
        ((flat.params["a"].square().sum() + flat.params["b"].sum()) / 2).backward()
    np.testing.assert_allclose(flat.gradient, [*PARAMS["a"].ravel(), 0, 0, 0, 0], rtol=1e-6)
    norm = float(np.linalg.norm(PARAMS["a"]))
    assert float(flat.clip_gradient(0.5)) == pytest.approx(norm)
    assert float(flat.gradient.norm()) == pytest.approx(0.5)
    assert float(flat.clip_gradient(9.0)) == pytest.approx(0.5)
    assert float(flat.gradient.norm()) == pytest.approx(0.5)
