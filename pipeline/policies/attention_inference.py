"""One step of linear-attention in NumPy, for acting; the equations are in pipeline.nn.linear_attention."""

import numpy as np

from metaloom.pipeline.nn.cells import CELL, CellSpec
from metaloom.pipeline.types import Array, Params


class AttentionInference:
    """All tasks at once, each by products of its own. See CellInference."""

    def __init__(self, spec: CellSpec, params: Params) -> None:
        self.state_size, self.feature_size = spec.state_size, spec.hidden_size
        self._sizes = spec.attention
        self._input_size = spec.input_size
        self._params = params

    def step(self, inputs: Array, state: Array) -> tuple[Array, Array]:
        """See CellInference."""
        written, last = np.split(state, [-self._input_size], axis=-1)
        events = np.concatenate([inputs, last], axis=-1)
        values = self._layer("value", np.maximum(self._layer("event", events), 0))
        keys, queries = _softmax(self._layer("key", events)), _softmax(self._layer("query", inputs))
        memory = written.reshape(*written.shape[:-1], self._sizes.key_size, self._sizes.value_size)
        memory = memory + keys[..., None] * values[..., None, :]
        read = np.matmul(queries[..., None, :], memory)[..., 0, :]
        features = np.maximum(self._layer("reading", np.concatenate([read, inputs], axis=-1)), 0)
        features = np.maximum(self._layer("features", features), 0)
        return features, np.concatenate([memory.reshape(written.shape), inputs], axis=-1)

    def _layer(self, name: str, x: Array) -> Array:
        return np.matmul(x, self._params[f"{CELL}.{name}.kernel"]) + self._params[f"{CELL}.{name}.bias"][:, None]


def _softmax(values: Array) -> Array:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)
