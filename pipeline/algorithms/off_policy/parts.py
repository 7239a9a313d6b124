"""Building blocks of off-policy losses in torch: minibatch tensors, the squashed Gaussian, and twin Q-functions."""

import math
from collections.abc import Mapping
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.nn.networks import Network
from metaloom.pipeline.policies.actors.off_policy import MAX_LOG_STD, MIN_LOG_STD
from metaloom.pipeline.types import Array, Transitions


class TransitionTensors(NamedTuple):
    """Transitions as tensors; `terminated` is 1 where the task ended the episode, otherwise 0."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    next_observations: Tensor
    terminated: Tensor


def tensor_like(like: Tensor, array: Array) -> Tensor:
    """Convert an array to a tensor with the device and dtype of `like`; int64 arrays keep their dtype."""
    dtype = torch.int64 if array.dtype == np.int64 else like.dtype
    return torch.as_tensor(array, dtype=dtype, device=like.device)


def transitions_like(like: Tensor, transitions: Transitions) -> TransitionTensors:
    """Convert transitions to tensors with the device and dtype of `like`."""
    return TransitionTensors(*(tensor_like(like, getattr(transitions, name)) for name in TransitionTensors._fields))


class TanhGaussianSample(NamedTuple):
    """Actions [n, A] in (-1, 1) with their joint log-densities [n], and mean, log_std and u [n, A] before the tanh."""

    actions: Tensor
    log_prob: Tensor
    mean: Tensor
    log_std: Tensor
    u: Tensor


def sample(outputs: Tensor, noise: Tensor) -> TanhGaussianSample:
    """Sample a = tanh(u) with u = μ + σ ε, and compute log π(a) = log N(u; μ, σ) - Σ log(1 - tanh² u).

    Haarnoja et al. 2018, arXiv:1801.01290, eq. 20 and 21. The outputs [n, 2A] are the means μ, then log σ, which is
    clamped; the noise ε [n, A] is standard normal.
    """
    mean, raw = outputs.chunk(2, -1)
    log_std = raw.clamp(MIN_LOG_STD, MAX_LOG_STD)
    u = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - log_slope(u)
    return TanhGaussianSample(u.tanh(), log_prob.sum(-1), mean, log_std, u)


def log_slope(u: Tensor) -> Tensor:
    """Return log(1 - tanh² u), the log of the derivative of tanh."""
    # Exact, unlike log(1 - a² + 1e-6) in the paper's code, which is inaccurate for |u| > 6.
    return 2 * (math.log(2) - u - softplus(-2 * u, threshold=50))


class TwinQ(FlatTensors):
    """Two Q-functions with their parameters in one vector. Fujimoto et al. 2018, arXiv:1802.09477, section 4.2."""

    def __init__(self, network: Network, params: Mapping[str, Array], device: torch.device) -> None:
        """Copy parameters q1.* and q2.*; `network` is the first Q-function's."""
        super().__init__(params, device)
        self._network = network
        self._leaves, self._gradients = (self._stacked(vector) for vector in (self.vector, self.gradient))
        self._fixed = {name: leaf.detach() for name, leaf in self._leaves.items()}
        for leaf in self._leaves.values():
            leaf.requires_grad_()

    def __call__(self, *inputs: Tensor, learn: bool = False) -> Tensor:
        """Return both Q-values [2, n] of inputs [n, ...], which are concatenated along the last axis.

        With `learn`, the values have gradients with respect to the parameters as well as the inputs.
        """
        joined = torch.cat(inputs, -1)
        params = self._leaves if learn else self._fixed
        return self._network(params, joined.expand(2, *joined.shape)).squeeze(-1)

    def backward(self, loss: Tensor, *others: FlatTensors) -> None:
        """Write the gradient of a loss to `gradient` and to the gradients of the other vectors."""
        leaves, gradients = [*self._leaves.values()], [*self._gradients.values()]
        for other in others:
            leaves += other.params.values()
            gradients += (leaf.grad for leaf in other.params.values() if leaf.grad is not None)
        # Avoid autograd's accumulation, which warns about non-contiguous leaves [2, ...].
        for gradient, value in zip(gradients, torch.autograd.grad(loss, leaves, materialize_grads=True), strict=True):
            gradient.copy_(value)

    def half(self, prefix: str) -> FlatTensors:
        """Return the Q-function with this name prefix, as a view that shares memory."""
        half, place = copy(self), int(prefix != self._network.prefix)
        half.vector, half.gradient = (vector.chunk(2)[place] for vector in (self.vector, self.gradient))
        half.params = {name: leaf for name, leaf in self.params.items() if name.startswith(f"{prefix}.")}
        half.learned = self.learned[: len(half.vector)]
        return half

    def _stacked(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views [2, ...] of a vector, keyed by the first network's parameter names."""
        views: dict[str, Tensor] = {}
        start = 0
        for name, shape in self._network.shapes.items():
            stop = start + math.prod(shape)
            views[name], start = vector.view(2, -1)[:, start:stop].view(2, *shape), stop
        return views
