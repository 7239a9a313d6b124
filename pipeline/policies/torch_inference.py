"""The forward pass for acting of all networks that are not plain ones, in torch."""

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.nn.networks import build_network
from metaloom.pipeline.nn.spec import NetworkSpec
from metaloom.pipeline.types import Array, TaskParams

ROWS_MULTIPLE = 4
"""torch's float32 products have the same bits in every row when the number of rows is a multiple of this."""


class TorchInference:
    """Any network, task by task on one thread. See Inference.

    A task's rows are padded with zeros to a multiple of four. Every call of the network then has one shape, whatever
    other tasks there are: together, where vectorized loops end would depend on the number of tasks.
    """

    def __init__(self, prefix: str, spec: NetworkSpec, params: TaskParams, num_rows: int) -> None:
        # An operator that cannot be repeated exactly is refused by name when it is called.
        torch.use_deterministic_algorithms(True)
        self._network = build_network(prefix, spec)
        self._params = _of_tasks({name: params.params[name] for name in self._network.shapes})
        num_tasks, padded_rows = len(self._params), -(-num_rows // ROWS_MULTIPLE) * ROWS_MULTIPLE
        padded = np.zeros((num_tasks, padded_rows, spec.input_size), np.float32)
        self._padded = list(torch.from_numpy(padded))
        self.inputs = padded[:, :num_rows]
        self.output_size = spec.output_size
        self._outputs = np.empty((num_tasks, num_rows, spec.output_size), np.float32)

    def outputs(self) -> Array:
        """See Inference."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                for params, rows, outputs in zip(self._params, self._padded, self._outputs, strict=True):
                    outputs[:] = self._network(params, rows).numpy()[: len(outputs)]
        finally:
            torch.set_num_threads(threads)
        return self._outputs


def _of_tasks(params: dict[str, Array]) -> list[dict[str, Tensor]]:
    """Every task's parameters as tensors; once where all tasks have the same."""
    num_tasks = len(next(iter(params.values())))
    if all(value.strides[0] == 0 for value in params.values()):
        return [{name: torch.tensor(value[0]) for name, value in params.items()}] * num_tasks
    return [{name: torch.tensor(value[b]) for name, value in params.items()} for b in range(num_tasks)]
