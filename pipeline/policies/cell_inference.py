"""One step of a network with a memory, for acting, in fixed shapes: NumPy for built-in cells, torch for others."""

from typing import Protocol

import numpy as np

from metaloom.pipeline.nn.cells import CELL, GRU, LINEAR_ATTENTION, RECURRENT_NETWORKS, CellSpec, cell_shapes
from metaloom.pipeline.policies.inference import Affine
from metaloom.pipeline.types import Array, Params, Shapes


class CellInference(Protocol):
    """Features and states of B tasks x E rows, whose bits depend on E and not on B; see Inference.

    Attributes:
        state_size: S.
        feature_size: F.
    """

    state_size: int
    feature_size: int

    def step(self, inputs: Array, state: Array) -> tuple[Array, Array]:
        """Return features [B, E, F] and the next states [B, E, S], of inputs [B, E, in] and states [B, E, S]."""
        ...


def cell_inference(spec: CellSpec, params: Params) -> CellInference:
    """Set up a cell with these parameters [B, ...]."""
    if spec.name == LINEAR_ATTENTION:
        return AttentionInference(spec, params)
    if spec.name in RECURRENT_NETWORKS:
        return GatedCell(spec, params)
    # Imported here: only a cell of the user's own needs torch.
    from metaloom.pipeline.policies.torch_inference import TorchCell

    return TorchCell(spec, params)


def shapes_of(spec: CellSpec) -> Shapes:
    """Return the shapes of a cell's parameters."""
    if spec.name in RECURRENT_NETWORKS:
        return cell_shapes(spec)
    from metaloom.pipeline.nn.recurrent import build_cell  # as above

    return build_cell(spec).shapes


class GatedCell:
    """A gru or lstm in NumPy; the equations are in pipeline.nn.recurrent. See CellInference."""

    def __init__(self, spec: CellSpec, params: Params) -> None:
        self.state_size, self.feature_size = spec.state_size, spec.hidden_size
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
    # By tanh, which neither overflows nor has another formula for large numbers.
    half = np.float32(0.5)
    return half + half * np.tanh(half * values)


class AttentionInference:
    """All tasks at once, each by products of its own. See CellInference."""

    def __init__(self, spec: CellSpec, params: Params) -> None:
        self.state_size, self.feature_size = spec.state_size, spec.hidden_size
        options = spec.attention
        self._places, self._input_size = (options.key_size, options.value_size), spec.input_size
        self._reads_asinh = options.reading == "asinh"
        self._event, self._value, self._key, self._query, self._reading, self._features = (
            Affine(params, f"{CELL}.{name}") for name in ("event", "value", "key", "query", "reading", "features")
        )

    def step(self, inputs: Array, state: Array) -> tuple[Array, Array]:
        written, last = np.split(state, [-self._input_size], axis=-1)
        events = np.concatenate([inputs, last], axis=-1)
        values = self._value(_relu(self._event(events)))
        keys, queries = _softmax(self._key(events)), _softmax(self._query(inputs))
        memory = written.reshape(*written.shape[:-1], *self._places)
        memory = memory + keys[..., None] * values[..., None, :]
        read = np.matmul(queries[..., None, :], memory)[..., 0, :]
        if self._reads_asinh:
            read = np.arcsinh(read)
        features = _relu(self._features(_relu(self._reading(np.concatenate([read, inputs], axis=-1)))))
        return features, np.concatenate([memory.reshape(written.shape), inputs], axis=-1)


def _relu(values: Array) -> Array:
    return np.maximum(values, 0)


def _softmax(values: Array) -> Array:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)
