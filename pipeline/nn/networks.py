"""Networks as functions of explicit parameters: multilayer perceptrons, convolutional networks, and any torch module.

A layer computes x·K + b with a kernel K of shape (in, out). Parameters and inputs may have a leading task axis; each
task then has separate parameters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.memory import require_room
from metaloom.pipeline.nn.modules import ModuleNetwork, scaled
from metaloom.pipeline.nn.spec import NetworkSpec, check_fits, convolutions, layer_paths, parameter_shapes
from metaloom.pipeline.types import Params, Shapes


def initialize_shapes(shapes: Shapes, rng: np.random.Generator) -> Params:
    """Draw float32 kernels from U(±√(6 / (in + out))) (Glorot and Bengio 2010) in order; biases are zero.

    In a convolution kernel (out, in, k, k), each channel counts as k² inputs or outputs. Raises ConfigError if training
    would need more memory than this machine has.
    """
    require_room(shapes, setting="policy or critic, hidden_sizes")
    params: Params = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            params[name] = np.zeros(shape, np.float32)
            continue
        limit = np.sqrt(6 / ((shape[0] + shape[1]) * int(np.prod(shape[2:]))))
        params[name] = rng.uniform(-limit, limit, shape).astype(np.float32)
    return params


def affine(name: str, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Return x·K + b for inputs [N, in], or [B, N, in] if parameters and inputs have a task axis."""
    kernel, bias = params[f"{name}.kernel"], params[f"{name}.bias"]
    if kernel.dim() == 2:
        return torch.addmm(bias, inputs, kernel)
    return torch.baddbmm(bias.unsqueeze(1), inputs, kernel)


@cache
def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation function with this name. It may modify its argument in place."""
    known: dict[str, Callable[[Tensor], Tensor]] = {"identity": lambda x: x, "tanh": _tanh, "relu": torch.relu}
    return known[name] if name in known else getattr(torch.nn, name)()


def _tanh(values: Tensor) -> Tensor:
    # With a task axis, compute in place: autograd saves the factors of the preceding product, not its result. For a
    # minibatch without a task axis, an autograd function in Python costs more than it saves.
    in_place = values.dim() == 3 and values.device.type == "cpu"
    return cast(Tensor, _InPlaceTanh.apply(values)) if in_place else torch.tanh(values)


class _InPlaceTanh(torch.autograd.Function):
    """NumPy's tanh, which actors use too, applied in place."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        array = values.detach().numpy()
        np.tanh(array, out=array)
        ctx.mark_dirty(values)
        ctx.save_for_backward(values)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,), (result,) = gradients, ctx.saved_tensors
        return torch.ops.aten.tanh_backward(gradient, result)


class Network(Protocol):
    """Network as a function of explicit parameters, whose names begin with a prefix."""

    @property
    def prefix(self) -> str: ...

    @property
    def spec(self) -> NetworkSpec: ...

    @property
    def shapes(self) -> Shapes: ...  # parameter name -> shape, in order

    def initialize(self, rng: np.random.Generator) -> Params:
        """Draw initial float32 parameters; return arrays keyed by name, in order."""
        ...

    def __call__(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Return outputs [N, out] for inputs [N, in], or [b, N, out] if inputs and parameters have a task axis b.

        An input is a flattened, unscaled observation followed by any extra inputs.
        """
        ...


@dataclass(frozen=True)
class MLP:
    """Multilayer perceptron, computed for all tasks at once."""

    prefix: str
    spec: NetworkSpec
    residual: ClassVar[bool] = False

    @property
    def shapes(self) -> Shapes:
        return parameter_shapes(self.prefix, self.spec)

    def initialize(self, rng: np.random.Generator) -> Params:
        return initialize_shapes(self.shapes, rng)

    def __call__(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        return self._dense(params, inputs if self.spec.input_scale == 1 else scaled(self.spec, inputs))

    def _dense(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        activate = activation(self.spec.activation)
        *hidden, last = layer_paths(self.prefix, len(self.spec.hidden_sizes))
        for name in hidden:
            after = activate(affine(name, params, x))
            x = x + after if self.residual and name != hidden[0] else after
        return activation(self.spec.output_activation)(affine(last, params, x))


class ResidualMLP(MLP):
    """Multilayer perceptron with skip connections x + σ(x·K + b) from the second hidden layer onward.

    He et al. 2016, arXiv:1512.03385, with one layer per block. See Network.
    """

    residual = True


class CNN(MLP):
    """Convolutional layers followed by a multilayer perceptron."""

    def __call__(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        spec, found = self.spec, convolutions(self.spec)
        shape = found.height, found.width, found.channels
        if found.channels_first:
            shape = found.channels, found.height, found.width
        tasks, activate = inputs.shape[:-2].numel(), activation(spec.activation)
        x = inputs[..., : spec.observation_size].reshape(tasks, -1, *shape) / spec.input_scale
        # Treat tasks as groups of channels: [N, tasks * channels, height, width].
        x = x.permute((1, 0, 2, 3, 4) if found.channels_first else (1, 0, 4, 2, 3)).flatten(1, 2)
        for layer in found.layers:
            kernel, bias = (params[f"{self.prefix}.{layer.name}.{part}"] for part in ("kernel", "bias"))
            kernel = kernel.reshape(-1, *kernel.shape[-3:])
            x = activate(torch.nn.functional.conv2d(x, kernel, bias.reshape(-1), layer.stride, groups=tasks))
        features = x.reshape(-1, tasks, found.features).transpose(0, 1).reshape(*inputs.shape[:-1], found.features)
        return self._dense(params, torch.cat([features, inputs[..., spec.observation_size :]], -1))


def build_network(prefix: str, spec: NetworkSpec) -> Network:
    """Build the network that a spec describes, with parameters named `prefix.*`."""
    check_fits(spec)
    built_in: dict[str, Callable[[str, NetworkSpec], Network]] = {"mlp": MLP, "residual": ResidualMLP, "cnn": CNN}
    return built_in.get(spec.name, ModuleNetwork)(prefix, spec)
