"""The policies' forward pass for acting: numpy only, all tasks at once, in fixed shapes."""

from collections.abc import Callable
from typing import Literal

import numpy as np

from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.types import Array, Params, TaskParams

MEAN_NETWORK = "mean_network"
LOGITS_NETWORK = "logits_network"

Activation = Literal["tanh", "relu"]


class NetworkInference:
    """Outputs of a network for B tasks x E rows, each task under its own parameters; its last layer is linear.

    The bits of a row of a float32 matrix product depend on how many rows the product has, not on what the others hold.
    So a task's product always has all its E rows, also when episodes have ended; then the bits of its actions do not
    depend on those ends, nor on the other tasks, their number or their order.

    Attributes:
        inputs: [B, E, O] float32: write the observations here.
        output_size: outputs of the network.
    """

    def __init__(
        self, prefix: str, config: PolicyConfig, params: TaskParams, num_rows: int, activation: Activation = "tanh"
    ) -> None:
        layers = _layers(config)
        self._activate = _ACTIVATE_IN_PLACE[activation]
        self._kernels = [params.params[f"{prefix}.{layer}.kernel"] for layer in layers]
        biases = [params.params[f"{prefix}.{layer}.bias"] for layer in layers]
        self._biases = [np.ascontiguousarray(bias[:, None, :]) for bias in biases]
        B, observation_size, _ = self._kernels[0].shape
        self.inputs = np.zeros((B, num_rows, observation_size), np.float32)
        self._outputs = [np.empty((B, num_rows, kernel.shape[2]), np.float32) for kernel in self._kernels]
        self.output_size = self._outputs[-1].shape[2]

    def outputs(self) -> Array:
        """[B, E, out] float32 for the current `inputs`; the next call overwrites it."""
        x = self.inputs
        for kernel, bias, out in zip(self._kernels, self._biases, self._outputs, strict=True):
            np.matmul(x, kernel, out=out)
            out += bias
            if out is not self._outputs[-1]:
                self._activate(out)
            x = out
        return x


class GaussianInference:
    """Means of the actions of B tasks x E rows, each task under its own parameters; see NetworkInference.

    Attributes:
        inputs: [B, E, O] float32: write the observations here.
        log_std: [B, A] float32, with the floor applied.
    """

    def __init__(self, config: PolicyConfig, params: TaskParams, num_rows: int) -> None:
        self._network = NetworkInference(MEAN_NETWORK, config, params, num_rows)
        self.inputs = self._network.inputs
        self.log_std = np.maximum(params.params["log_std"], np.float32(np.log(config.min_std)))

    def mean(self) -> Array:
        """[B, E, A] float32 for the current `inputs`; the next call overwrites it."""
        return self._network.outputs()


def check_params(config: PolicyConfig, params: Params, observation_size: int, action_size: int) -> None:
    """Refuse parameters [B, ...] of a Gaussian policy that do not fit the environment.

    Raises:
        ValueError: naming the parameter, its shape and the one required.
    """
    check_shapes(params, {"log_std": (action_size,)})
    check_network(MEAN_NETWORK, config, params, observation_size, action_size)


def check_network(prefix: str, config: PolicyConfig, params: Params, input_size: int, output_size: int) -> None:
    """Refuse parameters [B, ...] of a network that does not have these inputs and outputs.

    Raises:
        ValueError: naming the parameter, its shape and the one required.
    """
    sizes = [input_size, *config.hidden_sizes, output_size]
    required: dict[str, tuple[int, ...]] = {}
    for layer, rows, columns in zip(_layers(config), sizes[:-1], sizes[1:], strict=True):
        required[f"{prefix}.{layer}.kernel"] = (rows, columns)
        required[f"{prefix}.{layer}.bias"] = (columns,)
    check_shapes(params, required)


def check_shapes(params: Params, required: dict[str, tuple[int, ...]]) -> None:
    """Refuse parameters that are missing, not finite, or of another shape than [B, ...] with the required one behind B.

    Raises:
        ValueError: naming the parameter, what it is and what is required.
    """
    for name, shape in required.items():
        if name not in params or params[name].shape[1:] != shape:
            found = params[name].shape if name in params else "nothing"
            raise ValueError(f"policy parameter {name}: found {found}; required [{', '.join(map(str, ('B', *shape)))}]")
        finite = np.isfinite(params[name])
        if not finite.all():
            task = np.argwhere(~finite)[0][0]
            raise ValueError(f"policy parameter {name} of task {task} is not finite; required finite numbers")


def log_softmax(logits: Array) -> Array:
    """Normalized log-probabilities along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _tanh(values: Array) -> None:
    np.tanh(values, out=values)


def _relu(values: Array) -> None:
    np.maximum(values, 0, out=values)


_ACTIVATE_IN_PLACE: dict[Activation, Callable[[Array], None]] = {"tanh": _tanh, "relu": _relu}


def _layers(config: PolicyConfig) -> list[str]:
    return [f"hidden_{i}" for i in range(len(config.hidden_sizes))] + ["output"]
