"""Parameters that an optimizer takes down the gradients of losses, as one vector on any device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.nn.optimization import OptimizerConfig
from metaloom.pipeline.nn.vector_optimizers import vector_optimizer
from metaloom.pipeline.types import Array, Params


class Descent:
    """An optimizer of one vector of parameters, which goes on from a state.

    Attributes:
        flat: the parameters.
    """

    def __init__(
        self, config: OptimizerConfig, flat: FlatTensors, state: Mapping[str, Array], *, epsilon: float | None = None
    ) -> None:
        """`epsilon` is that of Adam and RMSprop where the configuration has none; see vector_optimizer."""
        self.flat = flat
        self._optimizer = vector_optimizer(config, flat.vector, state, epsilon=epsilon)
        self._fixed = None if flat.learned.all() else torch.from_numpy(~flat.learned).to(flat.vector.device)

    def step(self, learning_rate: float, direction: Array | None = None) -> None:
        """Move what learns of the parameters against their gradient, or against another direction [D]."""
        vector = self.flat.vector
        before = None if self._fixed is None else vector[self._fixed]
        gradient = self.flat.gradient if direction is None else torch.from_numpy(direction).to(vector.device)
        self._optimizer.step(gradient, learning_rate)
        if self._fixed is not None and before is not None:
            # Weight decay moves what has no gradient as well.
            vector[self._fixed] = before

    def down(self, loss: Tensor, learning_rate: float, max_norm: float | None = None) -> Tensor:
        """Take one step down the gradient of a loss, shortened to a norm; returns the norm that it had."""
        self.flat.backward(loss)
        norm = self.flat.clip_gradient(max_norm)
        self.step(learning_rate)
        return norm

    @property
    def vector(self) -> Array:
        """The parameters [D]."""
        return self.flat.vector.cpu().numpy()

    @property
    def gradient(self) -> Array:
        """Of the last loss, [D]."""
        return self.flat.gradient.cpu().numpy()

    @property
    def state(self) -> Params:
        """State of the optimizer by name."""
        return self._optimizer.state
