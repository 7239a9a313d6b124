"""Multilayer perceptrons as functions of a mapping from name to parameter.

A layer computes x·K + b with a kernel K of shape (in, out). Every parameter may have a leading task axis.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.memory import require_room
from metaloom.pipeline.nn.spec import NetworkSpec, layer_names
from metaloom.pipeline.types import Params, Shapes


def initialize_shapes(shapes: Shapes, rng: np.random.Generator) -> Params:
    """Draw float32 kernels from U(±√(6 / (in + out))) (Glorot and Bengio 2010) and zero biases, in order.

    A convolution's kernel (out, in, k, k) counts k² inputs and outputs per channel.

    Raises:
        ConfigError: training them would take more memory than this machine has.
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


def mlp(
    prefix: str,
    num_hidden: int,
    params: Mapping[str, Tensor],
    inputs: Tensor,
    activate: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the output of a network with a linear last layer.

    Args:
        prefix: of the names in `params`.
        num_hidden: hidden layers.
        params: kernels (in, out) and biases (out), or [B, in, out] and [B, out].
        inputs: [N, in], or [B, N, in] when the parameters have a task axis.
        activate: behind hidden layers; tanh by default.
    """
    *hidden_layers, output_layer = layer_names(num_hidden)
    for name in hidden_layers:
        inputs = (activate or _tanh)(affine(f"{prefix}.{name}", params, inputs))
    return affine(f"{prefix}.{output_layer}", params, inputs)


def affine(name: str, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """x·K + b of one layer; see `mlp`."""
    kernel, bias = params[f"{name}.kernel"], params[f"{name}.bias"]
    if kernel.dim() == 2:
        return torch.addmm(bias, inputs, kernel)
    return torch.baddbmm(bias.unsqueeze(1), inputs, kernel)


def scaled(spec: NetworkSpec, inputs: Tensor) -> Tensor:
    """Divide the observations by their scale; numbers behind them stay as they are."""
    if spec.input_scale == 1:
        return inputs
    observations, extra = inputs[..., : spec.observation_size], inputs[..., spec.observation_size :]
    return torch.cat([observations / spec.input_scale, extra], -1)


@cache
def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Look up an activation by one of the names in ACTIVATIONS; it may change its argument."""
    known: dict[str, Callable[[Tensor], Tensor]] = {"identity": lambda x: x, "tanh": _tanh, "relu": torch.relu}
    return known[name] if name in known else getattr(torch.nn, name)()


def _tanh(values: Tensor) -> Tensor:
    # Of many tasks in place: the product before it keeps its factors, not its result, so autograd needs no second
    # buffer. A minibatch without a task axis is over sooner than the call of a function that is written in Python.
    in_place = values.dim() == 3 and values.device.type == "cpu"
    return cast(Tensor, _InPlaceTanh.apply(values)) if in_place else torch.tanh(values)


class _InPlaceTanh(torch.autograd.Function):
    """NumPy's tanh, which acting policies use too."""

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
