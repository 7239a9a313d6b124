"""Parameters and gradients as views of two torch vectors, with an optimizer that updates the parameter vector.

For small networks, an optimizer spends more time looping over parameters than computing.
"""

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.nn.optimization import OptimizerConfig
from metaloom.pipeline.nn.torch_optimizers import vector_optimizer
from metaloom.pipeline.types import Array, Params


class FlatTensors:
    """Named parameters that are differentiated by autograd and updated in place by an optimizer; see `optimize`."""

    def __init__(
        self, params: Mapping[str, Array], device: torch.device | str = "cpu", learned: Collection[str] | None = None
    ) -> None:
        flat = np.concatenate([np.ravel(value) for value in params.values()])
        self.vector: Tensor = torch.from_numpy(flat).to(device)  # all parameters in order, [D]
        self.gradient: Tensor = torch.zeros_like(self.vector)  # zero for fixed parameters, [D]
        self.learned: Array = np.zeros(len(self.vector), bool)  # False for fixed parameters, [D]
        self.params: dict[str, Tensor] = {}  # autograd leaves that share the memory of `vector`
        offset = 0
        for name, value in params.items():
            entries = slice(offset, offset + value.size)
            offset += value.size
            leaf = self.vector[entries].view(value.shape).detach()
            if learned is None or name in learned:
                self.learned[entries] = True
                leaf.requires_grad_()
                # Autograd accumulates into an existing gradient in place.
                leaf.grad = self.gradient[entries].view(value.shape)
            self.params[name] = leaf

    def backward(self, loss: Tensor) -> None:
        """Write the gradient of a loss to `gradient`."""
        self.gradient.zero_()
        loss.backward()

    def clip_gradient(self, max_norm: float | None) -> Tensor:
        """Clip the gradient to a maximum norm and return its norm before clipping, without synchronizing the device."""
        norm = torch.linalg.vector_norm(self.gradient)
        if max_norm is not None:
            self.gradient *= (max_norm / norm).clamp(max=1)
        return norm

    def copies(self) -> Params:
        """Return NumPy copies of the parameters, keyed by name."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self.params.items()}

    def optimize(self, config: OptimizerConfig, state: Mapping[str, Array], *, epsilon: float | None = None) -> None:
        """Restore an optimizer from its state; Adam and RMSprop use `epsilon` unless the configuration sets ε."""
        self._optimizer = vector_optimizer(config, self.vector, state, epsilon=epsilon)
        self._unlearned = None if self.learned.all() else torch.from_numpy(~self.learned).to(self.vector.device)

    def step(self, learning_rate: float, direction: Array | None = None) -> None:
        """Take an optimizer step down the gradient, or down another direction [D]; fixed parameters do not change."""
        before = None if self._unlearned is None else self.vector[self._unlearned]
        gradient = self.gradient if direction is None else torch.from_numpy(direction).to(self.vector.device)
        self._optimizer.step(gradient, learning_rate)
        if self._unlearned is not None and before is not None:
            # Weight decay would also move fixed parameters.
            self.vector[self._unlearned] = before

    def down(self, loss: Tensor, learning_rate: float, max_norm: float | None = None) -> Tensor:
        """Take an optimizer step on a loss with gradient clipping, and return the gradient norm before clipping."""
        self.backward(loss)
        norm = self.clip_gradient(max_norm)
        self.step(learning_rate)
        return norm

    @property
    def optimizer_state(self) -> Params:
        """Optimizer state, keyed by name."""
        return self._optimizer.state
