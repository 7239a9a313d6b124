"""Networks as functions of explicit parameters: the multilayer perceptron, and any torch module."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.nn.mlp import initialize_mlp, layer_names
from metaloom.pipeline.nn.spec import NetworkSpec
from metaloom.pipeline.types import Params


class Network(Protocol):
    """Outputs of a network, given its parameters by name; holds none itself.

    Attributes:
        prefix: of the names of its parameters.
        spec: what it is.
    """

    @property
    def prefix(self) -> str: ...

    @property
    def spec(self) -> NetworkSpec: ...

    def initialize(self, rng: np.random.Generator) -> Params:
        """Float32 parameters by name, in order; the same for the same generator."""
        ...

    def __call__(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Outputs [N, out] of inputs [N, in]; [b, N, out] where inputs and parameters have a leading task axis [b]."""
        ...


@dataclass(frozen=True)
class MLP:
    """A multilayer perceptron, whose layers compute x·K + b for all tasks at once. See Network."""

    prefix: str
    spec: NetworkSpec

    def initialize(self, rng: np.random.Generator) -> Params:
        """Kernels after Glorot and Bengio 2010, zero biases; see Network."""
        return initialize_mlp(self.prefix, self.spec.input_size, self.spec.hidden_sizes, self.spec.output_size, rng)

    def __call__(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Outputs; see Network."""
        activate, activate_last = activation(self.spec.activation), activation(self.spec.output_activation)
        *hidden, last = layer_names(len(self.spec.hidden_sizes))
        x = inputs / self.spec.input_scale if self.spec.input_scale != 1 else inputs
        for name in hidden:
            x = activate(_affine(f"{self.prefix}.{name}", params, x))
        return activate_last(_affine(f"{self.prefix}.{last}", params, x))


def _affine(name: str, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    kernel, bias = params[f"{name}.kernel"], params[f"{name}.bias"]
    return torch.addmm(bias, x, kernel) if kernel.dim() == 2 else torch.baddbmm(bias.unsqueeze(1), x, kernel)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """An activation by name: identity, tanh, relu, or a class of torch.nn without required arguments."""
    known: dict[str, Callable[[Tensor], Tensor]] = {"identity": lambda x: x, "tanh": torch.tanh, "relu": torch.relu}
    return known[name] if name in known else getattr(torch.nn, name)()


def build_network(prefix: str, spec: NetworkSpec) -> Network:
    """The network that a spec describes, with parameters named `prefix.*`."""
    return MLP(prefix, spec)
