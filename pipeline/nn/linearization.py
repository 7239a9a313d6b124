"""First and second derivatives of a tanh or relu network at fixed parameters, in many directions, in NumPy.

Automatic differentiation gives the same values (tests compare them) but recomputes shared parts for each direction, so
Hessian-vector products would take up to twice as long. R{x} is the derivative of x in the direction of a tangent
(Pearlmutter 1994, Neural Computation 6).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from metaloom.pipeline.nn.spec import layer_paths
from metaloom.pipeline.types import Array, Params

Tangents = Mapping[str, Array]  # direction in parameter space, keyed by parameter name, [b, ...] each


class LinearizedMLP:
    """MLP at fixed parameters and inputs, with separate parameters per task."""

    def __init__(self, prefix: str, num_hidden: int, params: Tangents, inputs: Array, activation: str = "tanh") -> None:
        self.activation = activation
        self.names: tuple[str, ...] = layer_paths(prefix, num_hidden)
        self.kernels: list[Array] = [params[f"{name}.kernel"] for name in self.names]  # [b, in, out] per layer
        self.inputs: list[Array] = [inputs]  # [b, N, in] per layer
        for name, kernel in zip(self.names, self.kernels, strict=True):
            sums = self.inputs[-1] @ kernel
            sums += params[f"{name}.bias"][:, None]
            if name != self.names[-1]:
                sums = np.tanh(sums, out=sums) if activation == "tanh" else np.maximum(sums, 0, out=sums)
            self.inputs.append(sums)
        self.outputs: Array = self.inputs.pop()  # [b, N, out]
        # Slopes of the activation before each layer but the first.
        self.slopes: list[Array] = [
            1 - np.square(x) if activation == "tanh" else (x > 0).astype(x.dtype) for x in self.inputs[1:]
        ]

    def push(self, tangents: Tangents) -> list[Array]:
        """Return R{output} for each layer, after its activation; the last entry is R{outputs}."""
        pushed: list[Array] = []
        for layer, (name, x) in enumerate(zip(self.names, self.inputs, strict=True)):
            change = x @ tangents[f"{name}.kernel"]
            change += tangents[f"{name}.bias"][:, None]
            if layer:
                change += pushed[-1] @ self.kernels[layer]
            if layer < len(self.slopes):
                change *= self.slopes[layer]
            pushed.append(change)
        return pushed

    def pull(self, cotangent: Array) -> Params:
        """Return the gradient of Σ outputs ⊙ cotangent, keyed by parameter name, [b, ...] each."""
        gradients: Params = {}
        for layer in reversed(range(len(self.names))):
            gradients |= self.layer_gradient(layer, _transposed(self.inputs[layer]) @ cotangent, cotangent)
            if layer:
                cotangent = cotangent @ _transposed(self.kernels[layer])
                cotangent *= self.slopes[layer - 1]
        return gradients

    def layer_gradient(self, layer: int, kernel: Array, cotangent: Array) -> Params:
        """Return a layer's kernel gradient, as given, and its bias gradient, the cotangent summed over rows."""
        return {f"{self.names[layer]}.kernel": kernel, f"{self.names[layer]}.bias": cotangent.sum(1)}


class PulledBack:
    """Pullback of a cotangent, `gradients`, keyed by parameter name. It can be differentiated in many directions."""

    def __init__(self, network: LinearizedMLP, cotangent: Array) -> None:
        self._network = network
        self._cotangents = {len(network.names) - 1: cotangent}
        self._bends: dict[int, Array] = {}
        self.gradients: Params = {}
        for layer in reversed(range(len(network.names))):
            x = network.inputs[layer]
            self.gradients |= network.layer_gradient(layer, _transposed(x) @ cotangent, cotangent)
            if layer:
                back = cotangent @ _transposed(network.kernels[layer])
                cotangent = self._cotangents[layer - 1] = back * network.slopes[layer - 1]
                if network.activation == "tanh":
                    # R{back (1 - x²)} = R{back} (1 - x²) - 2 back x R{x}
                    self._bends[layer] = np.multiply(back, x, out=back) * -2
        del self._cotangents[0]

    def differentiate(self, tangents: Tangents, pushed: Sequence[Array], cotangent: Array) -> Params:
        """Return R{pull}, the derivative of the pullback in the direction of the tangents.

        `pushed` is the result of `push(tangents)`, and `cotangent` is R{cotangent of the outputs}, [b, N, out].
        """
        network, change = self._network, cotangent
        gradients: Params = {}
        for layer in reversed(range(len(network.names))):
            kernel = _transposed(network.inputs[layer]) @ change
            if layer:
                kernel += _transposed(pushed[layer - 1]) @ self._cotangents[layer]
            gradients |= network.layer_gradient(layer, kernel, change)
            if layer:
                change = change @ _transposed(network.kernels[layer])
                change += self._cotangents[layer] @ _transposed(tangents[f"{network.names[layer]}.kernel"])
                change *= network.slopes[layer - 1]
                if layer in self._bends:
                    change += self._bends[layer] * pushed[layer - 1]
        return gradients


def _transposed(values: Array) -> Array:
    return values.transpose(0, 2, 1)
