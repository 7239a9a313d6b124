"""Parameters in one flat vector, and an MLP with hand-written derivatives on views of this vector.

With two or three layers and minibatches of 64 or 256 rows, autograd's overhead exceeds the computation.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Literal, NamedTuple

import numpy as np

from metaloom.pipeline.nn.optimization import OptimizerConfig
from metaloom.pipeline.nn.optimizers import IN_PLACE
from metaloom.pipeline.nn.spec import NetworkSpec, layer_paths
from metaloom.pipeline.types import Array, Params

Activation = Literal["tanh", "relu"]
Rows = Array | slice  # row indices [n] int64, or a range of rows
ALL = slice(None)


class Layer(NamedTuple):
    """A layer's kernel and bias, or their gradients. If `bias` is None, the last row of the kernel is the bias."""

    kernel: Array
    bias: Array | None


class FlatParams:
    """Parameters and their gradient, each as named views of one vector [D], with an optimizer that updates `vector`.

    Both vectors have the order and dtype of the mapping from which they are built.
    """

    def __init__(self, params: Mapping[str, Array]) -> None:
        self._shapes = {name: value.shape for name, value in params.items()}
        stops = np.cumsum([value.size for value in params.values()]).tolist()
        self._places = dict(zip(params, map(slice, [0, *stops[:-1]], stops), strict=True))
        self.vector: Array = np.concatenate([np.ravel(value) for value in params.values()])
        self.gradient: Array = np.zeros_like(self.vector)
        self.params: Params = self.views(self.vector)
        self.gradients: Params = self.views(self.gradient)

    def with_own_gradient(self) -> "FlatParams":
        """Return FlatParams that share the parameters but have a separate gradient."""
        other = copy(self)
        other.gradient = np.zeros_like(self.vector)
        other.gradients = other.views(other.gradient)
        return other

    def pack(self, values: Mapping[str, Array]) -> Array:
        """Return one array per parameter as a single vector, [D] float64, in the order of the parameters."""
        return np.concatenate([np.asarray(values[name], np.float64).ravel() for name in self.params])

    def views(self, vector: Array) -> Params:
        """Return views of a vector [D], keyed by parameter name."""
        return {name: vector[place].reshape(self._shapes[name]) for name, place in self._places.items()}

    def layer(self, name: str, *, fold_bias: bool) -> tuple[Layer, Layer]:
        """Return views of a layer's parameters and gradients. With `fold_bias`, the bias must follow its kernel."""
        kernel, bias = f"{name}.kernel", f"{name}.bias"
        if not fold_bias:
            return Layer(self.params[kernel], self.params[bias]), Layer(self.gradients[kernel], self.gradients[bias])
        first, last = self._places[kernel], self._places[bias]
        if first.stop != last.start:
            raise ValueError(f"fold_bias: {bias} does not follow {kernel}; give the parameters in layer order")
        whole, columns = slice(first.start, last.stop), self._shapes[kernel][1]
        weights, gradient = (vector[whole].reshape(-1, columns) for vector in (self.vector, self.gradient))
        return Layer(weights, None), Layer(gradient, None)

    def copies(self) -> Params:
        """Return copies of the parameters, keyed by name."""
        return {name: value.copy() for name, value in self.params.items()}

    def clip_gradient(self, max_norm: float | None) -> float:
        """Clip the gradient to a maximum norm and return its norm before clipping."""
        norm = float(np.sqrt(np.dot(self.gradient, self.gradient)))
        if max_norm is not None and norm > max_norm:
            self.gradient *= max_norm / norm
        return norm

    def optimize(self, config: OptimizerConfig, state: Mapping[str, Array], *, epsilon: float | None = None) -> None:
        """Restore Adam or RMSprop with default options from its state; `epsilon` replaces the default ε."""
        self._optimizer = IN_PLACE[config.name].of(state)
        self._optimizer.epsilon = epsilon or self._optimizer.epsilon

    def step(self, learning_rate: float, direction: Array | None = None) -> None:
        """Take an optimizer step down the gradient, or down another direction [D] instead."""
        self._optimizer.step(self.vector, self.gradient if direction is None else direction, learning_rate)

    @property
    def optimizer_state(self) -> Params:
        """Optimizer state, keyed by name."""
        return self._optimizer.state


class FlatNetwork:
    """Multilayer perceptron with a linear last layer, on views of a FlatParams.

    Each call reuses the buffers for hidden layers, but not the returned arrays.
    """

    def __init__(
        self, flat: FlatParams, layers: Sequence[str], activation: Activation = "tanh", *, fold_bias: bool = False
    ) -> None:
        """Build a network from the parameters `layer.kernel` and `layer.bias` in `flat` for each layer, in order.

        With `fold_bias`, a column of ones is appended to each layer's inputs, so that one matrix product includes the
        bias and another gives both gradients. This is faster with a thousand rows but slower with a hundred, and the
        last bits differ. The bias must follow its kernel in `flat`, and relu is required: it maps 1 to 1.
        """
        if fold_bias and activation != "relu":
            raise ValueError(f"fold_bias requires relu, which maps 1 to 1; got {activation}")
        pairs = [flat.layer(layer, fold_bias=fold_bias) for layer in layers]
        self._layers, self._gradients = [layer for layer, _ in pairs], [gradient for _, gradient in pairs]
        self._activate, self._times_slope = ACTIVATE_IN_PLACE[activation], _TIMES_SLOPE[activation]
        widths = [layer.kernel.shape[1] for layer in self._layers[:-1]]
        dtype, self._ones = flat.vector.dtype, int(fold_bias)
        self.input_size: int = len(self._layers[0].kernel) - self._ones
        self._inputs = _Buffer(self.input_size + self._ones, dtype, filled_with=1)
        self._outputs = [_Buffer(width + self._ones, dtype, filled_with=1) for width in widths]
        # Errors have the extra column too, filled with zeros: elementwise operations are fastest on whole arrays.
        self._errors = [_Buffer(width + self._ones, dtype, filled_with=0) for width in widths]
        self._activations: list[Array] = []

    @classmethod
    def of(cls, prefix: str, spec: NetworkSpec, flat: FlatParams, *, fold_bias: bool = False) -> "FlatNetwork":
        """Build the network that a plain spec describes, with parameters named `prefix.*`."""
        assert spec.is_plain
        activation: Activation = "tanh" if spec.activation == "tanh" else "relu"
        return cls(flat, layer_paths(prefix, len(spec.hidden_sizes)), activation, fold_bias=fold_bias)

    def forward(self, *inputs: Array) -> Array:
        """Return outputs [n, out] for inputs [n, in]. Several inputs are concatenated."""
        if len(inputs) == 1 and not self._ones:
            # Inputs may have another dtype, such as uint8.
            self._activations = [inputs[0].astype(self._layers[0].kernel.dtype, copy=False)]
        else:
            joined = self._inputs.first(len(inputs[0]))
            np.concatenate(inputs, axis=1, out=joined[:, : self.input_size])
            self._activations = [joined]
        n = len(self._activations[0])
        for (kernel, bias), buffer in zip(self._layers[:-1], self._outputs, strict=True):
            outputs = buffer.first(n)
            sums = np.matmul(self._activations[-1], kernel, out=outputs[:, : kernel.shape[1]])
            if bias is not None:
                sums += bias
            self._activate(outputs)
            self._activations.append(outputs)
        kernel, bias = self._layers[-1]
        outputs = self._activations[-1] @ kernel
        if bias is not None:
            outputs += bias
        return outputs

    def backward(self, output_gradient: Array, rows: Rows = ALL, *, write: bool = True) -> Array:
        """Backpropagate a loss: write the parameter gradient and return the gradient w.r.t. the first pre-activations.

        Args:
            output_gradient: Gradient of the loss with respect to the outputs, [n, out].
            rows: Rows of the last `forward` to which `output_gradient` belongs.
            write: False to leave the parameter gradient unchanged.
        """
        errors = output_gradient
        for index in reversed(range(0 if write else 1, len(self._layers))):
            outputs = self._activations[index]
            inputs = outputs[rows] if isinstance(rows, slice) else outputs.take(rows, axis=0)
            if write:
                kernel_gradient, bias_gradient = self._gradients[index]
                np.matmul(inputs.T, errors, out=kernel_gradient)
                if bias_gradient is not None:
                    np.add.reduce(errors, axis=0, out=bias_gradient)
            if index:
                kernel, whole = self._layers[index].kernel, self._errors[index - 1].first(len(errors))
                units = whole.shape[1] - self._ones
                below = whole[:, :units]
                # With one column there is nothing to sum, and matmul would be three times slower.
                (np.multiply if kernel.shape[1] == 1 else np.matmul)(errors, kernel[:units].T, out=below)
                self._times_slope(whole, inputs)
                errors = below
        return errors

    def input_gradient(
        self, output_gradient: Array, columns: slice = ALL, rows: Rows = ALL, *, write: bool = False
    ) -> Array:
        """Return the gradient with respect to the inputs, or to some of their columns, [n, columns]; see `backward`."""
        errors = self.backward(output_gradient, rows, write=write)
        return errors @ self._layers[0].kernel[: self.input_size][columns].T


class _Buffer:
    """Buffer of rows that grows as needed; new buffers are filled with a constant."""

    def __init__(self, width: int, dtype: np.dtype[Any], *, filled_with: float) -> None:
        self._buffer = np.empty((0, width), dtype)
        self._filled_with = filled_with

    def first(self, n: int) -> Array:
        """Return the first n rows, [n, width], without clearing them."""
        if n > len(self._buffer):
            self._buffer = np.full((n, self._buffer.shape[1]), self._filled_with, self._buffer.dtype)
        return self._buffer[:n]


ACTIVATE_IN_PLACE: Mapping[str, Callable[[Array], object]] = {
    "tanh": lambda values: np.tanh(values, out=values),
    "relu": lambda values: np.maximum(values, 0, out=values),
}
_TIMES_SLOPE: Mapping[str, Callable[[Array, Array], object]] = {
    "tanh": lambda errors, outputs: np.multiply(errors, 1 - np.square(outputs), out=errors),
    "relu": lambda errors, outputs: np.multiply(errors, outputs > 0, out=errors),
}
"""In-place multiplication of errors by an activation's slope, computed from its outputs."""


def renamed(arrays: Mapping[str, Array], old: str, new: str) -> Params:
    """Return the arrays whose names start with `old`, with this prefix replaced by `new`."""
    return {new + name[len(old) :]: value for name, value in arrays.items() if name.startswith(old)}
