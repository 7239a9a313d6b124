"""Setups of actors, with parameters of the test's own."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import nn

from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.actors import ActorSetup
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Params, TaskParams

HIDDEN = (7, 5)
CONFIG = PolicyConfig(hidden_sizes=HIDDEN)


def _random_network(prefix: str, num_tasks: int, inputs: int, outputs: int, seed: int = 0) -> Params:
    """[B, ...] kernels and biases of a network with the layers HIDDEN."""
    rng, sizes, params = np.random.default_rng(seed), [inputs, *HIDDEN, outputs], {}
    for layer, rows, columns in zip(("hidden_0", "hidden_1", "output"), sizes[:-1], sizes[1:], strict=True):
        params[f"{prefix}.{layer}.kernel"] = rng.normal(0, 0.6, (num_tasks, rows, columns)).astype(np.float32)
        params[f"{prefix}.{layer}.bias"] = rng.normal(0, 0.6, (num_tasks, columns)).astype(np.float32)
    return params


def _constant_network(prefix: str, num_tasks: int, inputs: int, outputs: list[float]) -> Params:
    """The same outputs for all tasks, whatever the inputs."""
    params = {name: np.zeros_like(v) for name, v in _random_network(prefix, num_tasks, inputs, len(outputs)).items()}
    return params | {f"{prefix}.output.bias": np.tile(np.float32(outputs), (num_tasks, 1))}


def _relu_network(prefix: str, params: Mapping[str, np.ndarray], task: int) -> nn.Sequential:
    """The network of a task as torch has it, in float64."""
    layers: list[nn.Module] = []
    for name in ("hidden_0", "hidden_1", "output"):
        kernel, bias = (torch.tensor(params[f"{prefix}.{name}.{part}"][task]).double() for part in ("kernel", "bias"))
        linear = nn.Linear(*kernel.shape).double()
        linear.weight.data, linear.bias.data = kernel.T.contiguous(), bias
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@pytest.fixture
def config() -> PolicyConfig:
    """The policy whose networks these are."""
    return CONFIG


@pytest.fixture
def random_network() -> Callable[..., Params]:
    """A network (prefix, num_tasks, inputs, outputs) with random parameters for each task."""
    return _random_network


@pytest.fixture
def constant_network() -> Callable[..., Params]:
    """A network (prefix, num_tasks, inputs, outputs) that gives the same outputs for all tasks and inputs."""
    return _constant_network


@pytest.fixture
def relu_network() -> Callable[..., nn.Sequential]:
    """The network (prefix, params, task) of a task as torch has it."""
    return _relu_network


@pytest.fixture
def setup() -> Callable[..., ActorSetup]:
    """A setup of B tasks with E episodes over T steps."""

    def make(
        params: Params,
        *,
        B: int,
        E: int,
        T: int = 1,
        A: int = 1,
        O: int = 5,
        num_actions: int = 0,
        config: PolicyConfig = CONFIG,
        draw: bool = True,
        first_task: int = 0,
    ) -> ActorSetup:
        return ActorSetup(
            config,
            TaskParams(params),
            np.zeros((T, B * E, A), np.float32),
            num_rows=E,
            spaces=Spaces((O,), 1.0, 0 if num_actions else A, num_actions),
            rngs=[generator(1, "actions", 0, 0, first_task + b) for b in range(B)] if draw else None,
            belief_rng=lambda b, e: generator(1, "beliefs", 0, 0, first_task + b, e),
        )

    return make
