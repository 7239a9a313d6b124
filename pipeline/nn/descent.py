"""Parameters that an optimizer takes down the gradients of losses, as one vector on any device."""

from __future__ import annotations

from collections.abc import Mapping

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
        self,
        config: OptimizerConfig,
        flat: FlatTensors,
        state: Mapping[str, Array],
        learning_rate: float,
        *,
        epsilon: float | None = None,
    ) -> None:
        """`epsilon` is that of Adam and RMSprop where the configuration has none; see vector_optimizer."""
        self.flat, self._learning_rate = flat, learning_rate
        self._optimizer = vector_optimizer(config, flat.vector, state, epsilon=epsilon)

    def down(self, loss: Tensor, max_norm: float | None = None) -> Tensor:
        """Take one step down the gradient of a loss, shortened to a norm; returns the norm that it had."""
        self.flat.backward(loss)
        norm = self.flat.clip_gradient(max_norm)
        self._optimizer.step(self.flat.gradient, self._learning_rate)
        return norm

    @property
    def state(self) -> Params:
        """State of the optimizer by name."""
        return self._optimizer.state
