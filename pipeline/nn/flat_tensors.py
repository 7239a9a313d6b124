"""A network's parameters as views of one vector, and their gradients as views of another.

With a small network an optimizer spends more time on finding its way from parameter to parameter than on arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.types import Array, Params


class FlatTensors:
    """Parameters by name, to be differentiated and changed in place.

    Attributes:
        params: by name, leaves of autograd that share the memory of `vector`.
        vector: [D], all parameters in the order of the mapping.
        gradient: [D], to which autograd adds; zero for what is not learned.
        learned: [D] bool.
    """

    def __init__(
        self, params: Mapping[str, Array], device: torch.device | str = "cpu", learned: Collection[str] | None = None
    ) -> None:
        flat = np.concatenate([np.ravel(value) for value in params.values()])
        self.vector: Tensor = torch.from_numpy(flat).to(device)
        self.gradient: Tensor = torch.zeros_like(self.vector)
        self.learned = np.zeros(len(self.vector), bool)
        self.params: dict[str, Tensor] = {}
        offset = 0
        for name, value in params.items():
            entries = slice(offset, offset + value.size)
            offset += value.size
            leaf = self.vector[entries].view(value.shape).detach()
            if learned is None or name in learned:
                self.learned[entries] = True
                leaf.requires_grad_()
                # Autograd adds to a gradient that is there, in place.
                leaf.grad = self.gradient[entries].view(value.shape)
            self.params[name] = leaf

    def backward(self, loss: Tensor) -> None:
        """Put the gradient of a loss into `gradient`."""
        self.gradient.zero_()
        loss.backward()

    def clip_gradient(self, max_norm: float | None) -> Tensor:
        """Shorten the gradient to a norm; returns the norm it had. Nothing is read back from the device."""
        norm = torch.linalg.vector_norm(self.gradient)
        if max_norm is not None:
            self.gradient *= (max_norm / norm).clamp(max=1)
        return norm

    def copies(self) -> Params:
        """The parameters by name, as arrays of their own."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self.params.items()}
