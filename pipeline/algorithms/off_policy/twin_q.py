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


class TwinQ:
    """Parameters of two networks of one kind, with a leading axis of two.

    Attributes:
        flat: one vector of the first network's parameters and then of the second's.
    """

    def __init__(self, network: Network, params: Mapping[str, Array], device: torch.device) -> None:
        """From parameters q1.* and q2.*, which are copied; `network` is the first."""
        self.flat, self._network = FlatTensors(params, device), network
        vectors, gradients = (of.view(2, -1) for of in (self.flat.vector, self.flat.gradient))
        self._leaves: dict[str, Tensor] = {}
        start = 0
        for name, shape in network.shapes.items():
            stop = start + math.prod(shape)
            leaf = vectors[:, start:stop].view(2, *shape).requires_grad_()
            leaf.grad = gradients[:, start:stop].view(2, *shape)
            self._leaves[name], start = leaf, stop
        self._numbers = {name: leaf.detach() for name, leaf in self._leaves.items()}

    def __call__(self, *inputs: Tensor, learn: bool = False) -> Tensor:
        """Values [2, n] of observations, actions and what is behind them, [n, ...] each.

        Args:
            inputs: are joined along the last axis.
            learn: gradients flow to the parameters as well, not to the inputs alone.
        """
        joined = torch.cat(inputs, -1)
        params = self._leaves if learn else self._numbers
        return self._network(params, joined.expand(2, *joined.shape)).squeeze(-1)
