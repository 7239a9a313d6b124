"""One step of a cell of the user's own, in torch, task by task. See CellInference."""

import numpy as np
import torch

from metaloom.pipeline.nn.cells import CellSpec
from metaloom.pipeline.nn.recurrent import build_cell
from metaloom.pipeline.policies.torch_inference import PaddedRows, one_thread
from metaloom.pipeline.types import Array, Params


class TorchCell:
    """Every task's rows are padded to a multiple of four, as PaddedRows does. See CellInference."""

    def __init__(self, spec: CellSpec, params: Params) -> None:
        self._cell = build_cell(spec)
        self.state_size, self.feature_size = self._cell.state_size, self._cell.feature_size
        self._params = {name: params[name] for name in self._cell.shapes}
        self._input_size = spec.input_size
        self._rows: PaddedRows | None = None

    def step(self, inputs: Array, state: Array) -> tuple[Array, Array]:
        """See CellInference."""
        if self._rows is None:
            self._rows = PaddedRows(self._params, inputs.shape[1], self._input_size + self.state_size)
        self._rows.inputs[..., : self._input_size] = inputs
        self._rows.inputs[..., self._input_size :] = state
        features = np.empty((*inputs.shape[:2], self.feature_size), np.float32)
        states = np.empty_like(state)
        with one_thread(), torch.no_grad():
            for b, (params, rows) in enumerate(self._rows):
                own, kept = rows[:, : self._input_size], rows[:, self._input_size :]
                of_rows, after = self._cell(params, own.unsqueeze(0), kept)
                features[b], states[b] = of_rows[0].numpy()[: len(features[b])], after.numpy()[: len(states[b])]
        return features, states
