"""Multilayer perceptrons as functions of a mapping from name to parameter.

A layer computes x·K + b with a kernel K of shape (in, out). Every parameter may have a leading task axis.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.types import Params


def initialize_mlp(
    prefix: str, input_size: int, hidden_sizes: Sequence[int], output_size: int, rng: np.random.Generator
) -> Params:
    """Float32 kernels from U(±√(6 / (in + out))) (Glorot and Bengio 2010) and zero biases, in layer order."""
    sizes = [input_size, *hidden_sizes, output_size]
    params: Params = {}
    for name, fan_in, fan_out in zip(layer_names(len(hidden_sizes)), sizes[:-1], sizes[1:], strict=True):
        limit = np.sqrt(6 / (fan_in + fan_out))
        params[f"{prefix}.{name}.kernel"] = rng.uniform(-limit, limit, (fan_in, fan_out)).astype(np.float32)
        params[f"{prefix}.{name}.bias"] = np.zeros(fan_out, np.float32)
    return params


def mlp(prefix: str, num_hidden: int, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Output of a tanh network with a linear last layer.

    Args:
        prefix: of the names in `params`.
        num_hidden: hidden layers.
        params: kernels (in, out) and biases (out), or [B, in, out] and [B, out].
        inputs: [N, in], or [B, N, in] when the parameters have a task axis.
    """
    return mlp_activations(prefix, num_hidden, params, inputs)[-1]


def mlp_activations(prefix: str, num_hidden: int, params: Mapping[str, Tensor], inputs: Tensor) -> list[Tensor]:
    """What goes into every layer of the network, from its inputs on, and last its output; arguments as for mlp."""
    *hidden_layers, output_layer = layer_names(num_hidden)
    activations = [inputs]
    for name in hidden_layers:
        activations.append(_tanh_(_layer(f"{prefix}.{name}", params, activations[-1])))
    return [*activations, _layer(f"{prefix}.{output_layer}", params, activations[-1])]


def layer_names(num_hidden: int) -> list[str]:
    """Names of the layers in order: hidden_0, ..., output."""
    return [*(f"hidden_{i}" for i in range(num_hidden)), "output"]


def _layer(name: str, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    kernel, bias = params[f"{name}.kernel"], params[f"{name}.bias"]
    if kernel.dim() == 2:
        return torch.addmm(bias, inputs, kernel)
    return torch.baddbmm(bias.unsqueeze(1), inputs, kernel)


def _tanh_(values: Tensor) -> Tensor:
    # In place: the product before it keeps its factors, not its result, so autograd needs no second buffer.
    return cast(Tensor, _InPlaceTanh.apply(values))


class _InPlaceTanh(torch.autograd.Function):
    """NumPy's tanh, which acting policies use too and which is many times as fast as torch's on one core."""

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
