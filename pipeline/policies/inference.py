"""Forward passes with fixed shapes for acting: in NumPy for plain networks and built-in cells, in torch for others."""

from dataclasses import replace
from typing import Protocol

import numpy as np

from metaloom.pipeline.nn.cells import CELL, ENCODER, GRU, LINEAR_ATTENTION, CellSpec, cell_shapes
from metaloom.pipeline.nn.flat_networks import ACTIVATE_IN_PLACE
from metaloom.pipeline.nn.spec import BUILT_IN_NETWORKS, RECURRENT_NETWORKS, NetworkSpec, layer_paths, parameter_shapes
from metaloom.pipeline.types import Array, BatchError, Params, Shapes, TaskParams

MEAN_NETWORK = "mean_network"
LOGITS_NETWORK = "logits_network"


class Inference(Protocol):
    """Forward pass of a network for B tasks x E rows, with separate parameters per task.

    How a row of a float32 matrix product is rounded depends on the number of rows, but not on the contents of other
    rows. So a task's product always has all E rows, including ended episodes, and a task's actions do not depend on
    other tasks or on when episodes end.
    """

    inputs: Array  # where callers write observations, [B, E, in] float32
    output_size: int  # number of outputs

    def outputs(self) -> Array:
        """Return outputs [B, E, out] float32 for the current `inputs`. The next call may overwrite the array."""
        ...


def network_inference(prefix: str, spec: NetworkSpec, params: TaskParams, num_rows: int) -> Inference:
    """Set up the forward pass of a network with these parameters, in NumPy if possible."""
    if spec.is_plain:
        return PlainInference(prefix, spec, params, num_rows)
    # Imported here: workers without torch start three times faster.
    from metaloom.pipeline.policies.torch_inference import TorchInference

    return TorchInference(prefix, spec, params, num_rows)


class PlainInference:
    """Multilayer perceptron with a linear last layer, in NumPy."""

    def __init__(self, prefix: str, spec: NetworkSpec, params: TaskParams, num_rows: int) -> None:
        layers = layer_paths(prefix, len(spec.hidden_sizes))
        self._activate = ACTIVATE_IN_PLACE[spec.activation]
        self._kernels = [params.params[f"{layer}.kernel"] for layer in layers]
        biases = [params.params[f"{layer}.bias"] for layer in layers]
        self._biases = [np.ascontiguousarray(bias[:, None, :]) for bias in biases]
        B, input_size, _ = self._kernels[0].shape
        self.inputs: Array = np.zeros((B, num_rows, input_size), np.float32)
        self._outputs = [np.empty((B, num_rows, kernel.shape[2]), np.float32) for kernel in self._kernels]
        self.output_size: int = self._outputs[-1].shape[2]

    def outputs(self) -> Array:
        x = self.inputs
        for kernel, bias, out in zip(self._kernels, self._biases, self._outputs, strict=True):
            np.matmul(x, kernel, out=out)
            out += bias
            if out is not self._outputs[-1]:
                self._activate(out)
            x = out
        return x


class Affine:
    """Dense layer x·K + b with separate parameters per task."""

    def __init__(self, params: Params, prefix: str) -> None:
        self._kernel = params[f"{prefix}.kernel"]
        self._bias = np.ascontiguousarray(params[f"{prefix}.bias"][:, None])

    def __call__(self, inputs: Array) -> Array:
        return np.matmul(inputs, self._kernel) + self._bias


def network_shapes(prefix: str, spec: NetworkSpec) -> Shapes:
    """Return the shapes of a network's parameters without the task axis, keyed by name."""
    if spec.name in BUILT_IN_NETWORKS:
        return parameter_shapes(prefix, spec)
    # Imported here: only custom networks must be built to find out their shapes.
    from metaloom.pipeline.nn.networks import build_network

    return build_network(prefix, spec).shapes


def check_shapes(params: Params, required: Shapes) -> None:
    """Raise BatchError unless the parameters exist, are finite, and have the required shapes after the task axis B."""
    for name, shape in required.items():
        if name not in params or params[name].shape[1:] != shape:
            found = params[name].shape if name in params else "nothing"
            raise BatchError(f"policy parameter {name}: got {found}; expected [{', '.join(map(str, ('B', *shape)))}]")
        finite = np.isfinite(params[name])
        if not finite.all():
            task = np.argwhere(~finite)[0][0]
            raise BatchError(f"policy parameter {name} of task {task} is not finite")


def log_softmax(logits: Array) -> Array:
    """Return the normalized log-probabilities along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class CellInference(Protocol):
    """Forward pass of a recurrent cell with state size S and F features, for B tasks x E rows; see Inference."""

    state_size: int
    feature_size: int

    def step(self, inputs: Array, state: Array) -> tuple[Array, Array]:
        """Return features [B, E, F] and next states [B, E, S] for inputs [B, E, in] and states [B, E, S]."""
        ...


def cell_inference(spec: CellSpec, params: Params) -> CellInference:
    """Set up the forward pass of a cell with these parameters [B, ...]."""
    if spec.encoder is not None:
        return EncodedInference(spec, spec.encoder, params)
    if spec.name == LINEAR_ATTENTION:
        return AttentionInference(spec, params)
    if spec.name in RECURRENT_NETWORKS:
        return GatedCell(spec, params)
    # Imported here, since only custom cells need torch.
    from metaloom.pipeline.policies.torch_inference import TorchCell

    return TorchCell(spec, params)


def shapes_of(spec: CellSpec) -> Shapes:
    """Return the shapes of a cell's parameters, including its encoder's."""
    if spec.encoder is not None:
        return network_shapes(ENCODER, spec.encoder) | shapes_of(replace(spec, encoder=None))
    if spec.name in RECURRENT_NETWORKS:
        return cell_shapes(spec)
    from metaloom.pipeline.nn.recurrent import build_cell  # as above

    return build_cell(spec).shapes


class EncodedInference:
    """Recurrent cell preceded by an observation encoder."""

    def __init__(self, spec: CellSpec, encoder: NetworkSpec, params: Params) -> None:
        self._cell = cell_inference(replace(spec, encoder=None), params)
        self._spec, self._params = encoder, TaskParams(params)
        self._encoder: Inference | None = None
        self.state_size: int = self._cell.state_size
        self.feature_size: int = self._cell.feature_size

    def step(self, inputs: Array, state: Array) -> tuple[Array, Array]:
        if self._encoder is None:
            self._encoder = network_inference(ENCODER, self._spec, self._params, inputs.shape[1])
        self._encoder.inputs[:], rest = np.split(inputs, [self._spec.input_size], axis=-1)
        return self._cell.step(np.concatenate([self._encoder.outputs(), rest], axis=-1), state)


class GatedCell:
    """GRU or LSTM in NumPy; pipeline.nn.recurrent states the equations."""

    def __init__(self, spec: CellSpec, params: Params) -> None:
        self.state_size: int = spec.state_size
        self.feature_size: int = spec.hidden_size
        self._kernels = [params[f"{CELL}.{name}"] for name in ("input_kernel", "hidden_kernel")]
        self._biases = [
            np.ascontiguousarray(params[f"{CELL}.{name}"][:, None]) for name in ("input_bias", "hidden_bias")
        ]
        self._advance = self._gru if spec.name == GRU else self._lstm

    def step(self, inputs: Array, state: Array) -> tuple[Array, Array]:
        H = self.feature_size
        hidden = np.ascontiguousarray(state[..., :H])
        of_input, of_hidden = (
            np.matmul(x, kernel) + bias
            for x, kernel, bias in zip((inputs, hidden), self._kernels, self._biases, strict=True)
        )
        return self._advance(of_input, of_hidden, state)

    def _gru(self, of_input: Array, of_hidden: Array, state: Array) -> tuple[Array, Array]:
        H = self.feature_size
        resets, keeps = np.split(_sigmoid(of_input[..., : 2 * H] + of_hidden[..., : 2 * H]), 2, axis=-1)
        new = np.tanh(of_input[..., 2 * H :] + resets * of_hidden[..., 2 * H :])
        state = new + keeps * (state - new)
        return state, state

    def _lstm(self, of_input: Array, of_hidden: Array, state: Array) -> tuple[Array, Array]:
        H = self.feature_size
        gates = of_input + of_hidden
        takes, keeps = np.split(_sigmoid(np.ascontiguousarray(gates[..., : 2 * H])), 2, axis=-1)
        new = np.tanh(np.ascontiguousarray(gates[..., 2 * H : 3 * H]))
        shows = _sigmoid(np.ascontiguousarray(gates[..., 3 * H :]))
        cell = keeps * state[..., H:] + takes * new
        hidden = shows * np.tanh(cell)
        return hidden, np.concatenate([hidden, cell], axis=-1)


def _sigmoid(values: Array) -> Array:
    # Use tanh, which does not overflow.
    half = np.float32(0.5)
    return half + half * np.tanh(half * values)


class AttentionInference:
    """Linear attention in NumPy, for all tasks at once with a separate product per task."""

    def __init__(self, spec: CellSpec, params: Params) -> None:
        self.state_size: int = spec.state_size
        self.feature_size: int = spec.hidden_size
        options = spec.attention
        self._places, self._input_size = (options.key_size, options.value_size), spec.input_size
        self._reads_asinh = options.reading == "asinh"
        self._event, self._value, self._key, self._query, self._reading, self._features = (
            Affine(params, f"{CELL}.{name}") for name in ("event", "value", "key", "query", "reading", "features")
        )

    def step(self, inputs: Array, state: Array) -> tuple[Array, Array]:
        written, last = np.split(state, [-self._input_size], axis=-1)
        events = np.concatenate([inputs, last], axis=-1)
        values = self._value(_rectified(self._event(events)))
        keys, queries = _softmax(self._key(events)), _softmax(self._query(inputs))
        memory = written.reshape(*written.shape[:-1], *self._places)
        memory = memory + keys[..., None] * values[..., None, :]
        read = np.matmul(queries[..., None, :], memory)[..., 0, :]
        if self._reads_asinh:
            read = np.arcsinh(read)
        features = _rectified(self._features(_rectified(self._reading(np.concatenate([read, inputs], axis=-1)))))
        return features, np.concatenate([memory.reshape(written.shape), inputs], axis=-1)


def _rectified(values: Array) -> Array:
    return np.maximum(values, 0)


def _softmax(values: Array) -> Array:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)
