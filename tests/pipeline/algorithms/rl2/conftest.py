"""Episodes of a few small tasks, in trials of two."""

import numpy as np
import pytest
from small_setups import A, O

from metaloom.pipeline.types import EpisodeBatch

B, E, T = 3, 4, 5


@pytest.fixture
def episodes():
    rng, shape = np.random.default_rng(0), (B, E, T)
    none = np.zeros((B, E), np.bool_)
    return EpisodeBatch(
        observations=rng.standard_normal((B, E, T + 1, O), np.float32),
        actions=rng.standard_normal((*shape, A), np.float32),
        rewards=rng.standard_normal(shape, np.float32) - 3,
        terminated=none,
        truncated=~none,
        lengths=np.full((B, E), T, np.int32),
        behavior={"mean": np.zeros((*shape, A), np.float32), "log_std": np.zeros((B, A), np.float32)},
        reward_terms={},
        initial_state=np.zeros((B, E, 0)),
    )
