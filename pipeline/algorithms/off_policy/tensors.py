"""Minibatches and noise as tensors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.types import Array, Transitions


class TransitionTensors(NamedTuple):
    """Transitions [...] as tensors; `terminated` is 1 where the task ended and 0 elsewhere. See Transitions."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    next_observations: Tensor
    terminated: Tensor


def tensor_like(like: Tensor, array: Array) -> Tensor:
    """An array on the device of a tensor, and in its precision unless it holds integers."""
    dtype = torch.int64 if array.dtype == np.int64 else like.dtype
    return torch.as_tensor(array, dtype=dtype, device=like.device)


def transitions_like(like: Tensor, transitions: Transitions) -> TransitionTensors:
    """Transitions on the device of a tensor and in its precision."""
    return TransitionTensors(*(tensor_like(like, getattr(transitions, name)) for name in TransitionTensors._fields))
