"""Small random transitions, and networks under autograd in float64 beside those under test."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from small_setups import CHOICES, DISCRETE_ACTIONS, A, O, small_setup

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.types import Array, LearnerState, Minibatch, Transitions

N = 8
BOX = small_setup(PolicyConfig(hidden_sizes=(6, 5)))
DISCRETE = small_setup(BOX.policy, **DISCRETE_ACTIONS)


@pytest.fixture
def minibatches() -> Callable[..., list[Minibatch]]:
    """Some minibatches [1, N]; every fourth transition is terminated."""

    def build(setup: Setup, count: int = 1, seed: int = 0) -> list[Minibatch]:
        rng = np.random.default_rng(seed)

        def numbers(*shape: int) -> Array:
            return rng.normal(size=shape).astype(np.float32)

        def one() -> Minibatch:
            actions = rng.integers(CHOICES, size=(1, N)) if setup.num_actions else np.tanh(numbers(1, N, A))
            terminated = np.arange(N)[None] % 4 == 3
            return Minibatch(Transitions(numbers(1, N, O), actions, numbers(1, N), numbers(1, N, O), terminated))

        return [one() for _ in range(count)]

    return build


def leaves(arrays: Mapping[str, Array], prefix: str = "") -> dict[str, torch.Tensor]:
    """Float64 leaves of the layers whose names start with `prefix`."""
    layers = {name: value for name, value in arrays.items() if name.endswith(("kernel", "bias"))}
    return {
        name: torch.tensor(value, dtype=torch.float64, requires_grad=True)
        for name, value in layers.items()
        if name.startswith(prefix)
    }


def relu_network(params: Mapping[str, torch.Tensor], prefix: str, inputs: torch.Tensor) -> torch.Tensor:
    """Outputs of a network of two hidden layers."""
    for layer in ("hidden_0", "hidden_1"):
        inputs = torch.relu(inputs @ params[f"{prefix}.{layer}.kernel"] + params[f"{prefix}.{layer}.bias"])
    return inputs @ params[f"{prefix}.output.kernel"] + params[f"{prefix}.output.bias"]


def doubles(transitions: Transitions) -> list[torch.Tensor]:
    """Observations, actions, rewards, next observations and whether an episode goes on, of the only task."""
    t = transitions
    arrays = (t.observations, t.actions, t.rewards, t.next_observations, ~t.terminated)
    return [torch.tensor(x[0], dtype=None if x.dtype == np.int64 else torch.float64) for x in arrays]


def same(a: LearnerState, b: LearnerState) -> bool:
    """Tell if two learners are equal to the bit."""
    return all(
        x.keys() == y.keys() and all(np.array_equal(x[name], y[name]) for name in x)
        for x, y in ((a.params, b.params), (a.optimizer, b.optimizer), (a.extra, b.extra))
    )
