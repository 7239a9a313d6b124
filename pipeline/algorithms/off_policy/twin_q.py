"""Two Q-functions of observation and action, the smaller of which is believed, evaluated as one network.

Fujimoto et al. 2018, arXiv:1802.09477, section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.nn.networks import Network
from metaloom.pipeline.types import Array


class TwinQ(FlatTensors):
    """Parameters of two networks of one kind as one vector: all of the first and then all of the second."""

    def __init__(self, network: Network, params: Mapping[str, Array], device: torch.device) -> None:
        """From parameters q1.* and q2.*, which are copied; `network` is the first."""
        super().__init__(params, device)
        self._network = network
        self._leaves, self._gradients = (self._stacked(vector) for vector in (self.vector, self.gradient))
        self._fixed = {name: leaf.detach() for name, leaf in self._leaves.items()}
        for leaf in self._leaves.values():
            leaf.requires_grad_()

    def __call__(self, *inputs: Tensor, learn: bool = False) -> Tensor:
        """Values [2, n] of observations, actions and what is behind them, [n, ...] each.

        Args:
            inputs: are joined along the last axis.
            learn: gradients flow to the parameters as well, not to the inputs alone.
        """
        joined = torch.cat(inputs, -1)
        params = self._leaves if learn else self._fixed
        return self._network(params, joined.expand(2, *joined.shape)).squeeze(-1)

    def backward(self, loss: Tensor, *others: FlatTensors) -> None:
        """Put the gradient of a loss into `gradient`, and into those of others that it depends on."""
        leaves, gradients = [*self._leaves.values()], [*self._gradients.values()]
        for other in others:
            leaves += other.params.values()
            gradients += (leaf.grad for leaf in other.params.values() if leaf.grad is not None)
        # Not by autograd's own adding up: it warns of leaves [2, ...] that do not lie close together.
        for gradient, value in zip(gradients, torch.autograd.grad(loss, leaves, materialize_grads=True), strict=True):
            gradient.copy_(value)

    def _stacked(self, vector: Tensor) -> dict[str, Tensor]:
        """Views [2, ...] of a vector, by the names of the first network."""
        views: dict[str, Tensor] = {}
        start = 0
        for name, shape in self._network.shapes.items():
            stop = start + math.prod(shape)
            views[name], start = vector.view(2, -1)[:, start:stop].view(2, *shape), stop
        return views
