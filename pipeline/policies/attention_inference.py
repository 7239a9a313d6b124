"""One step of linear-attention in NumPy, for acting; the equations are in pipeline.nn.linear_attention."""

import numpy as np

from metaloom.pipeline.nn.cells import CELL, CellSpec
from metaloom.pipeline.policies.inference import Affine
from metaloom.pipeline.types import Array, Params


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
        """See CellInference."""
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
