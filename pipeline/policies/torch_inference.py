"""Forward passes in torch, one task at a time, for custom cells and all networks that are not plain."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.nn.cells import CellSpec
from metaloom.pipeline.nn.networks import build_network
from metaloom.pipeline.nn.recurrent import build_cell
from metaloom.pipeline.nn.spec import NetworkSpec
from metaloom.pipeline.numerics import Setting, SharedSettings
from metaloom.pipeline.types import Array, Params, TaskParams

ROWS_MULTIPLE = 4
"""If the number of rows is a multiple of this, torch computes all rows of a float32 product in the same way."""


_DETERMINISTIC = Setting(
    "deterministic debug mode", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, (2,)
)
_acting = SharedSettings()


class PaddedRows:
    """Each task's parameters, and its input rows zero-padded to a multiple of four rows. Callers write to `inputs`.

    The network is called once per task, so that all calls have the same shape. In a joint call, the remainders of
    vectorized loops would depend on the number of tasks.
    """

    def __init__(self, params: Mapping[str, Array], num_rows: int, input_size: int) -> None:
        num_tasks = len(next(iter(params.values())))
        if all(value.strides[0] == 0 for value in params.values()):
            # All tasks have the same parameters.
            self._params = [{name: torch.tensor(value[0]) for name, value in params.items()}] * num_tasks
        else:
            self._params = [{name: torch.tensor(value[b]) for name, value in params.items()} for b in range(num_tasks)]
        padded_rows = -(-num_rows // ROWS_MULTIPLE) * ROWS_MULTIPLE
        padded = np.zeros((len(self._params), padded_rows, input_size), np.float32)
        self._padded = list(torch.as_tensor(padded))
        self.inputs: Array = padded[:, :num_rows]

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        return zip(self._params, self._padded, strict=True)


class TorchInference:
    """Forward pass of any network, one task at a time on one thread."""

    def __init__(self, prefix: str, spec: NetworkSpec, params: TaskParams, num_rows: int) -> None:
        self._network = build_network(prefix, spec)
        own = {name: params.params[name] for name in self._network.shapes}
        self._rows = PaddedRows(own, num_rows, spec.input_size)
        self.inputs: Array = self._rows.inputs
        self.output_size: int = spec.output_size
        self._outputs: Array = np.empty((len(self.inputs), num_rows, spec.output_size), np.float32)

    def outputs(self) -> Array:
        with reproducible_inference():
            for b, (params, rows) in enumerate(self._rows):
                self._outputs[b] = self._network(params, rows).numpy()[: len(self._outputs[b])]
        return self._outputs


@contextmanager
def reproducible_inference() -> Generator[None]:
    """Within the block, torch has one thread and no gradients, and raises an error at a nondeterministic operator.

    The last bits may depend on the number of threads. The caller's settings are restored at the end.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _acting.kept([_DETERMINISTIC]), torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)


class TorchCell:
    """Forward pass of a custom cell, one task at a time, with input rows padded by PaddedRows."""

    def __init__(self, spec: CellSpec, params: Params) -> None:
        self._cell = build_cell(spec)
        self.state_size: int = self._cell.state_size
        self.feature_size: int = self._cell.feature_size
        self._params = {name: params[name] for name in self._cell.shapes}
        self._input_size = spec.input_size
        self._rows: PaddedRows | None = None

    def step(self, inputs: Array, state: Array) -> tuple[Array, Array]:
        if self._rows is None:
            self._rows = PaddedRows(self._params, inputs.shape[1], self._input_size + self.state_size)
        self._rows.inputs[..., : self._input_size] = inputs
        self._rows.inputs[..., self._input_size :] = state
        features = np.empty((*inputs.shape[:2], self.feature_size), np.float32)
        states = np.empty_like(state)
        with reproducible_inference():
            for b, (params, rows) in enumerate(self._rows):
                own, kept = rows[:, : self._input_size], rows[:, self._input_size :]
                of_rows, after = self._cell(params, own.unsqueeze(0), kept)
                features[b], states[b] = of_rows[0].numpy()[: len(features[b])], after.numpy()[: len(states[b])]
        return features, states
