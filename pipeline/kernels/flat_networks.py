"""Parameters in one flat vector, and a network on views of it with its derivatives, in float32 and without autograd.

A minibatch of 64 or 256 rows through two or three layers takes a processor less time than an autograd engine takes to
note what it did, so the few derivatives there are are written down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from metaloom.pipeline.nn.mlp import layer_names
from metaloom.pipeline.types import Array, Params

Activation = Literal["tanh", "relu"]
Rows = Array | slice
"""Numbers of rows, [n] int64, or a range of them."""
ALL = slice(None)


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
    """A multilayer perceptron with a linear last layer, whose layers are named entries of some parameters.

    What hidden layers compute is kept in buffers that the next call overwrites; what is returned is the caller's.
    """

    def __init__(self, flat: FlatParams, layers: Sequence[str], activation: Activation = "tanh") -> None:
        self._layers = [(flat.params[f"{layer}.kernel"], flat.params[f"{layer}.bias"]) for layer in layers]
        self._gradients = [(flat.gradients[f"{layer}.kernel"], flat.gradients[f"{layer}.bias"]) for layer in layers]
        self._activate, self._times_slope = _ACTIVATIONS[activation]
        widths = [kernel.shape[1] for kernel, _ in self._layers[:-1]]
        self._outputs = [_Buffer(width) for width in widths]
        self._errors = [_Buffer(width) for width in widths]
        self._activations: list[Array] = []

    def forward(self, inputs: Array) -> Array:
        """Outputs [n, out] for inputs [n, in]; the next derivatives are about them."""
        self._activations = [inputs]
        for (kernel, bias), buffer in zip(self._layers[:-1], self._outputs, strict=True):
            outputs = np.matmul(self._activations[-1], kernel, out=buffer.first(len(inputs)))
            outputs += bias
            self._activate(outputs, out=outputs)
            self._activations.append(outputs)
        kernel, bias = self._layers[-1]
        return self._activations[-1] @ kernel + bias

    def backward(self, output_gradient: Array, rows: Rows = ALL) -> None:
        """Write the gradient of a loss with respect to the parameters.

        Args:
            output_gradient: [n, out], of the loss with respect to the outputs.
            rows: those of the last `forward` that are meant, n of them.
        """
        self._first_errors(output_gradient, rows)

    def backward_to_inputs(self, output_gradient: Array, columns: slice = ALL, rows: Rows = ALL) -> Array:
        """As `backward`; and the gradient with respect to the inputs, or some columns of them, [n, columns]."""
        return self._below_first(self._first_errors(output_gradient, rows), columns)

    def input_gradient(self, output_gradient: Array, columns: slice = ALL, rows: Rows = ALL) -> Array:
        """The gradient with respect to the inputs alone, [n, columns]; none of the parameters' is written."""
        errors = output_gradient
        for index in reversed(range(1, len(self._layers))):
            errors = self._errors_below(index, errors, self._activations[index][rows])
        return self._below_first(errors, columns)

    def _first_errors(self, output_gradient: Array, rows: Rows) -> Array:
        """Write the parameters' gradient; returns that with respect to the first layer's sums, [n, units]."""
        errors = output_gradient
        for index in reversed(range(len(self._layers))):
            inputs, (kernel_gradient, bias_gradient) = self._activations[index][rows], self._gradients[index]
            np.matmul(inputs.T, errors, out=kernel_gradient)
            np.add.reduce(errors, axis=0, out=bias_gradient)
            if index:
                errors = self._errors_below(index, errors, inputs)
        return errors

    def _errors_below(self, index: int, errors: Array, outputs: Array) -> Array:
        """The gradient with respect to the sums of layer `index - 1` from that of the layer above."""
        kernel, below = self._layers[index][0], self._errors[index - 1].first(len(errors))
        # A product with one column has no sums; matmul takes three times as long over it.
        (np.multiply if kernel.shape[1] == 1 else np.matmul)(errors, kernel.T, out=below)
        self._times_slope(below, outputs)
        return below

    def _below_first(self, errors: Array, columns: slice) -> Array:
        return errors @ self._layers[0][0][columns].T


class _Buffer:
    """A buffer of rows that grows as needed."""

    def __init__(self, width: int) -> None:
        self._buffer = np.empty((0, width), np.float32)

    def first(self, n: int) -> Array:
        """[n, width], with whatever it held."""
        if n > len(self._buffer):
            self._buffer = np.empty((n, self._buffer.shape[1]), np.float32)
        return self._buffer[:n]


def _relu(values: Array, out: Array) -> None:
    np.maximum(values, np.float32(0), out=out)


def _times_tanh_slope(errors: Array, outputs: Array) -> None:
    errors *= 1 - np.square(outputs)


def _times_relu_slope(errors: Array, outputs: Array) -> None:
    errors *= outputs > 0


_ACTIVATIONS: dict[Activation, tuple[Callable[..., object], Callable[[Array, Array], None]]] = {
    "tanh": (np.tanh, _times_tanh_slope),
    "relu": (_relu, _times_relu_slope),
}
"""A function that works in place, and what multiplies errors by its slope given its outputs."""


def layer_paths(prefix: str, num_hidden: int) -> list[str]:
    """Names in order of the layers of a network that is called `prefix`: prefix.hidden_0, ..., prefix.output."""
    return [f"{prefix}.{layer}" for layer in layer_names(num_hidden)]


def prefixed(arrays: Mapping[str, Array], prefix: str) -> Params:
    """The arrays under names with `prefix.` before them."""
    return {f"{prefix}.{name}": value for name, value in arrays.items()}


def unprefixed(arrays: Mapping[str, Array], prefix: str) -> Params:
    """The arrays whose names start with `prefix.`, under what comes after it."""
    return {name.removeprefix(f"{prefix}."): value for name, value in arrays.items() if name.startswith(f"{prefix}.")}
