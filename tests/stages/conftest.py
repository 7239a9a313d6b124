"""Batches that are written down number by number."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import ArrayLike

from metaloom.pipeline.types import EpisodeBatch


@pytest.fixture(scope="session")
def batch() -> Callable[[ArrayLike, ArrayLike, ArrayLike], EpisodeBatch]:
    """Makes episodes of observations [B, E, T+1, O], rewards [B, E, T] and lengths [B, E], all of them truncated."""
    return _batch


def _batch(observations: ArrayLike, rewards: ArrayLike, lengths: ArrayLike) -> EpisodeBatch:
    B, E, T = np.shape(rewards)
    return EpisodeBatch(
        observations=np.asarray(observations, np.float32),
        actions=np.zeros((B, E, T, 1), np.float32),
        rewards=np.asarray(rewards, np.float32),
        terminated=np.zeros((B, E), bool),
        truncated=np.ones((B, E), bool),
        lengths=np.asarray(lengths, np.int32),
        behavior={},
        reward_terms={},
        initial_state=np.zeros((B, E, 0)),
    )
