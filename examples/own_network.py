"""A network of one's own, a residual one with layer normalization, under ProMP.

    metaloom train promp-point-corner --set policy.network=own_network:Residual --set policy.network_options.blocks=2

in this folder. Nothing else changes: replay, resume, fork and evaluate find the class by its name.
"""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """x + W₂ σ(W₁ norm(x)). He et al. 2016, arXiv:1603.05027, with the normalization before the weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [N, width] of inputs [N, width]."""
        return x + self.layers(x)


class Residual(nn.Module):
    """Blocks between two linear layers, of which the last starts small so that first actions are near zero."""

    def __init__(self, input_shape: tuple[int, ...], output_size: int, *, width: int = 32, blocks: int = 1) -> None:
        super().__init__()
        (input_size,) = input_shape
        self.first = nn.Linear(input_size, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.last = nn.Linear(width, output_size)
        with torch.no_grad():
            self.last.weight *= 0.1

    def forward(self, observations: Tensor) -> Tensor:
        """Outputs [N, output_size] of observations [N, *input_shape]."""
        return self.last(self.blocks(self.first(observations)))
