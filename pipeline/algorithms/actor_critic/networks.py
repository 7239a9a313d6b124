"""Parameters in one flat vector, and a tanh network on views of it with its derivatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.types import Array, Params


class FlatParams:
    """Parameters by name as views of one float32 vector, and their gradient likewise.

    Attributes:
        vector: [D], all parameters in the order of the mapping.
        gradient: [D].
    """

    def __init__(self, params: Mapping[str, Array]) -> None:
        self._shapes = {name: value.shape for name, value in params.items()}
        self.vector = np.concatenate([np.ravel(value) for value in params.values()])
        self.gradient = np.zeros_like(self.vector)
        self.params = self._views(self.vector)
        self.gradients = self._views(self.gradient)

    def _views(self, vector: Array) -> Params:
        views: Params = {}
        offset = 0
        for name, shape in self._shapes.items():
            size = int(np.prod(shape))
            views[name] = vector[offset : offset + size].reshape(shape)
            offset += size
        return views

    def copies(self) -> Params:
        """The parameters by name, as arrays of their own."""
        return {name: value.copy() for name, value in self.params.items()}

    def clip_gradient(self, max_norm: float | None) -> float:
        """Shorten the gradient to a norm; returns the norm it had."""
        norm = float(np.sqrt(np.dot(self.gradient, self.gradient)))
        if max_norm is not None and norm > max_norm:
            self.gradient *= np.float32(max_norm / norm)
        return norm


class Network:
    """A tanh network with a linear last layer, whose layers are named entries of some parameters."""

    def __init__(self, flat: FlatParams, layers: Sequence[str]) -> None:
        self._layers = [(flat.params[f"{layer}.kernel"], flat.params[f"{layer}.bias"]) for layer in layers]
        self._gradients = [(flat.gradients[f"{layer}.kernel"], flat.gradients[f"{layer}.bias"]) for layer in layers]
        self._activations: list[Array] = []

    def forward(self, inputs: Array) -> Array:
        """Outputs [n, out] for inputs [n, in]; the next `backward` is about them."""
        self._activations = [inputs]
        last = len(self._layers) - 1
        for index, (kernel, bias) in enumerate(self._layers):
            outputs = self._activations[-1] @ kernel
            outputs += bias
            if index < last:
                np.tanh(outputs, out=outputs)
            self._activations.append(outputs)
        return self._activations.pop()

    def backward(self, output_gradient: Array) -> None:
        """Write the gradient of a loss with respect to the parameters, given that to the outputs, [n, out]."""
        errors = output_gradient
        for index in reversed(range(len(self._layers))):
            inputs, (kernel_gradient, bias_gradient) = self._activations[index], self._gradients[index]
            np.matmul(inputs.T, errors, out=kernel_gradient)
            np.add.reduce(errors, axis=0, out=bias_gradient)
            if index:
                errors = errors @ self._layers[index][0].T
                errors *= 1 - np.square(inputs)
