"""ReLU networks with derivatives by hand, in buffers that gradient steps share.

A layer is one matrix [in + 1, out], the kernel above the bias, and its inputs end in a column of ones: a single matrix
product then adds the bias, and a single one gives the gradient of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from metaloom.pipeline.nn.mlp import layer_names
from metaloom.pipeline.types import Array, Params

HIDDEN_BIAS = 0.1


class Network:
    """A network's parameters and their gradient, each as one vector.

    Attributes:
        vector: [D], kernel and bias of every layer in order.
        gradient: [D], of the last loss.
        layers: views of the vector, one matrix [in + 1, out] per layer.
        sizes: units of every layer, from the inputs to the outputs.
    """

    def __init__(self, params: Mapping[str, Array]) -> None:
        """A copy of parameters named hidden_0.kernel, hidden_0.bias, ..., output.bias."""
        names = layer_names(len(params) // 2 - 1)
        parts = [params[f"{name}.{part}"] for name in names for part in ("kernel", "bias")]
        self.vector = np.concatenate([np.ravel(part) for part in parts])
        self.gradient = np.zeros_like(self.vector)
        self.sizes = (*(len(kernel) for kernel in parts[::2]), len(parts[-1]))
        self.layers = self.views(self.vector)

    def views(self, vector: Array) -> list[Array]:
        """The layers' matrices in a vector [D]."""
        shapes = [(fan_in + 1, fan_out) for fan_in, fan_out in pairwise(self.sizes)]
        ends = np.cumsum([rows * columns for rows, columns in shapes])
        return [part.reshape(shape) for part, shape in zip(np.split(vector, ends[:-1]), shapes, strict=True)]

    def params(self) -> Params:
        """The parameters by name, as arrays of their own."""
        params: Params = {}
        for name, layer in zip(layer_names(len(self.layers) - 1), self.layers, strict=True):
            params |= {f"{name}.kernel": layer[:-1].copy(), f"{name}.bias": layer[-1].copy()}
        return params


class Activations:
    """Room for n rows on their way through networks of the same sizes, and for errors on their way back.

    Attributes:
        inputs: [n, in], to be filled in before `forward`.
        outputs: [n, out] of the last `forward`.
    """

    def __init__(self, sizes: Sequence[int], num_rows: int, dtype: np.dtype) -> None:
        self._layers = [np.ones((num_rows, size + 1), dtype) for size in sizes[:-1]]
        # Errors have a last column too, of zeros: elementwise work is fastest on whole arrays.
        self._errors = [np.zeros_like(layer) for layer in self._layers[1:]]
        self._positive = [np.empty(layer.shape, bool) for layer in self._layers[1:]]
        self.inputs = self._layers[0][:, :-1]
        self.outputs = np.empty((num_rows, sizes[-1]), dtype)

    def forward(self, layers: Sequence[Array]) -> Array:
        """The outputs; what follows is about them, until the next `forward`."""
        for inputs, layer, outputs in zip(self._layers[:-1], layers[:-1], self._layers[1:], strict=True):
            np.matmul(inputs, layer, out=outputs[:, :-1])
            np.maximum(outputs, 0, out=outputs)
        return np.matmul(self._layers[-1], layers[-1], out=self.outputs)

    def backward(self, layers: Sequence[Array], output_errors: Array, gradients: Sequence[Array]) -> None:
        """Write the gradients of a loss with respect to the layers, given that to the outputs, [n, out]."""
        errors = output_errors
        np.matmul(self._layers[-1].T, errors, out=gradients[-1])
        for i in reversed(range(len(self._errors))):
            errors = self._errors_below(i, layers, errors, self._layers[i + 1])
            np.matmul(self._layers[i].T, errors, out=gradients[i])

    def input_errors(self, layers: Sequence[Array], columns: slice) -> Array:
        """The gradient of the last `backward`'s loss with respect to some of the inputs, [n, columns]."""
        return self._errors[0][:, :-1] @ layers[0][columns].T

    def slopes(self, layers: Sequence[Array], rows: Array, columns: slice) -> Array:
        """Derivatives of the only output with respect to some of the inputs, for some rows: [len(rows), columns]."""
        errors = np.ones((len(rows), 1), self.outputs.dtype)
        for i in reversed(range(len(self._errors))):
            errors = self._errors_below(i, layers, errors, self._layers[i + 1].take(rows, axis=0))
        return errors @ layers[0][columns].T

    def _errors_below(self, i: int, layers: Sequence[Array], errors: Array, outputs: Array) -> Array:
        """Errors before the ReLU of hidden layer i from those of the layer above, [n, units]."""
        below, positive, kernel = self._errors[i][: len(errors)], self._positive[i][: len(errors)], layers[i + 1][:-1]
        if errors.shape[1] == 1:
            # A product with one inner dimension is many times slower as a matrix product.
            np.multiply(errors, kernel.T, out=below[:, :-1])
        else:
            np.matmul(errors, kernel.T, out=below[:, :-1])
        np.greater(outputs, 0, out=positive)
        below *= positive
        return below[:, :-1]


def initialize_relu(
    input_size: int, hidden_sizes: Sequence[int], output_size: int, rng: np.random.Generator, *, output_limit: float
) -> Params:
    """Float32 parameters that a network starts with, in layer order.

    Hidden kernels are from U(±1/√in) with in the units that a layer hears from, and hidden biases are 0.1; kernel and
    bias of the output from U(±output_limit), as in Lillicrap et al. 2016, arXiv:1509.02971, section 7.
    """
    names, sizes = layer_names(len(hidden_sizes)), [input_size, *hidden_sizes]
    params: Params = {}
    for name, fan_in, fan_out in zip(names[:-1], sizes[:-1], sizes[1:], strict=True):
        limit = 1 / np.sqrt(fan_in)
        params[f"{name}.kernel"] = rng.uniform(-limit, limit, (fan_in, fan_out)).astype(np.float32)
        params[f"{name}.bias"] = np.full(fan_out, HIDDEN_BIAS, np.float32)
    for part, shape in (("kernel", (sizes[-1], output_size)), ("bias", (output_size,))):
        params[f"{names[-1]}.{part}"] = rng.uniform(-output_limit, output_limit, shape).astype(np.float32)
    return params
