"""Observation and action sizes of environments, and the dtype of stored observations."""

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.nn.spec import Spaces, is_image


def spaces_of(env: gymnasium.Env[Any, Any]) -> Spaces:
    """Return the observation and action sizes of an environment made by `make_env`."""
    observations, actions = env.observation_space, env.action_space
    assert isinstance(observations, Box), "PolicyActions flattens all others"
    discrete = isinstance(actions, Discrete)
    # Images are scaled by their upper bound, such as 255 for bytes; a bound at the dtype's maximum means no bound.
    # Other observations are not scaled.
    high = float(np.max(observations.high, initial=0))
    scale = high if 0 < high < np.iinfo(np.int32).max else 1.0
    in_bytes = observations.dtype == np.uint8
    return Spaces(
        observation_shape=observations.shape,
        observation_scale=scale if is_image(observations.shape, 255.0 if in_bytes else 1.0) else 1.0,
        action_size=0 if discrete else math.prod(actions.shape or ()),
        num_actions=int(actions.n) if discrete else 0,
    )


def observation_dtype(space: gymnasium.Space[Any], config: EnvConfig) -> np.dtype[Any]:
    """Return the dtype of stored observations: float32, or the integer dtype of their space.

    Integer dtypes larger than float32 are kept only if float32 cannot represent all values of the space.
    """
    assert isinstance(space, Box), "PolicyActions flattens all others"
    dtype, float32 = np.dtype(space.dtype), np.dtype(np.float32)
    if not config.integer_observations or dtype.kind not in "iu":
        return float32
    largest = max(abs(float(space.low.min(initial=0))), abs(float(space.high.max(initial=0))))
    return dtype if dtype.itemsize <= float32.itemsize or largest > 2**24 else float32
